// SPDX-License-Identifier: Apache-2.0
// Seeded inputs that are the same on every machine, unlike the standard library's distributions.
#pragma once

#include <cstdint>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::testing {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}

  std::uint64_t next();
  // Returns an integer in 0 … bound − 1.
  std::int64_t below(std::int64_t bound);
  // Returns a number in −1 … 1 that uses all mantissa bits.
  float uniform();

  // Returns an f32 or bf16 tensor with values in −1 … 1.
  Tensor tensor(const Shape& shape, Dtype dtype);

  struct Picks {
    std::int64_t num_tokens = 0;
    std::int64_t top_k = 1;
    int num_experts = 1;
    double skew = 0.0;  // 0: even; 1: most picks go to a few experts
    double none = 0.0;  // fraction of picks that are −1
  };
  // Returns [T, K] ids, distinct within a token. Picks are −1 once a token runs out of experts.
  Tensor expert_ids(const Picks& picks);

 private:
  std::uint64_t state_;
};

// Returns fixed values in −100 … 100, denser around 0.
std::vector<float> wide_range();

}  // namespace switchyard::testing
