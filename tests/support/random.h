// Seeded inputs, the same on every machine: the standard library's distributions are not.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::testing {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}

  std::uint64_t next();
  // 0 … bound − 1
  std::int64_t below(std::int64_t bound);
  // −1 … 1, all mantissa bits in use
  float uniform();

  // [rows, columns] f32 or bf16 in −1 … 1.
  Tensor tensor(const Shape& shape, Dtype dtype);

  struct Picks {
    std::int64_t num_tokens = 0;
    std::int64_t top_k = 1;
    int num_experts = 1;
    double skew = 0.0;  // 0: even; 1: most picks go to few experts
    double none = 0.0;  // share of picks that are −1
  };
  // [T, K] distinct experts a token, where there are enough of them; otherwise −1.
  Tensor expert_ids(const Picks& picks);

 private:
  std::uint64_t state_;
};

// −100 … 100, close together around 0: not random, but for the same purpose.
std::vector<float> wide_range();

}  // namespace switchyard::testing
