// SPDX-License-Identifier: Apache-2.0
// Measures how far tensors are from recorded ones, and judges whether that is allowed.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::cli {

enum class Rule {
  equal,
  near,  // ‖ours − recorded‖₂ ≤ 1e-5·‖recorded‖₂, or ≤ 1e-6·‖dx‖₂ if ‖recorded‖₂ is zero
  near_small,     // like near with 1e-4, for differences of nearly equal numbers
  near_or_noise,  // near, or ≤ 1e-6·‖dx‖₂: a router's exact gradient may be zero
};

struct Difference {
  std::string tensor;
  Rule rule = Rule::near;
  double error_squared = 0.0;
  double recorded_squared = 0.0;
};

// One rank's differences, in the same order on every rank.
class Differences {
 public:
  // Adds to the tensor's difference. If both views are null, only lists the tensor.
  void add(const std::string& tensor, const ConstTensorView& ours, const ConstTensorView& recorded,
           Rule rule = Rule::near);
  void add_ids(const std::string& tensor, const Tensor& ours, const ConstTensorView& recorded);

  const std::vector<Difference>& all() const { return all_; }

 private:
  Difference& named(const std::string& tensor, Rule rule);

  std::vector<Difference> all_;
};

// One tensor compared with the recorded one, over all ranks or on the worst rank.
struct Comparison {
  std::string tensor;
  std::optional<int> rank = {};  // the worst rank; empty if the case was not recorded by rank
  double error = 0.0;            // ‖ours − recorded‖₂; for expert ids, how many differ
  double recorded = 0.0;         // ‖recorded‖₂
  double allowed = 0.0;
  bool by_floor = false;  // within the rounding error of a tensor whose exact value is zero

  bool ok() const { return std::isfinite(error) && error <= allowed; }
};

using RankDifferences = std::vector<std::vector<Difference>>;  // [ranks][tensors]

// Judges each tensor over all ranks.
std::vector<Comparison> judge_sum(const RankDifferences& by_rank);
// Judges each tensor on the rank where it is worst.
std::vector<Comparison> judge_worst(const RankDifferences& by_rank);

}  // namespace switchyard::cli
