// How far tensors are from recorded ones, and how far they may be.
#pragma once

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard::cli {

enum class Rule {
  equal,
  near,  // ‖ours − recorded‖₂ ≤ 1e-5·‖recorded‖₂; if that is zero, ≤ 1e-6·‖dx‖₂
  near_small,     // 1e-4: what is left of differences between nearly equal numbers
  near_or_noise,  // or ≤ 1e-6·‖dx‖₂ in any case: a router's gradient may be zero in truth
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
  // Adds to the tensor's difference; where views are none, only names it.
  void add(const std::string& tensor, const ConstTensorView& ours, const ConstTensorView& recorded,
           Rule rule = Rule::near);
  void add_ids(const std::string& tensor, const Tensor& ours, const ConstTensorView& recorded);

  const std::vector<Difference>& all() const { return all_; }

 private:
  Difference& named(const std::string& tensor, Rule rule);

  std::vector<Difference> all_;
};

// One tensor beside the recorded one, on the rank where it fares worst.
struct Comparison {
  std::string tensor;
  std::optional<int> rank = {};  // none where the case was not recorded by rank
  double error = 0.0;            // ‖ours − recorded‖₂; of expert ids, how many differ
  double recorded = 0.0;         // ‖recorded‖₂
  double allowed = 0.0;
  bool by_floor = false;  // allowed is what rounding leaves of a tensor that is zero in truth

  bool ok() const { return std::isfinite(error) && error <= allowed; }
};

using RankDifferences = std::vector<std::vector<Difference>>;  // [ranks][tensors]

// Each tensor over all ranks.
std::vector<Comparison> judge_sum(const RankDifferences& by_rank);
// Each tensor on the rank where it fares worst.
std::vector<Comparison> judge_worst(const RankDifferences& by_rank);

}  // namespace switchyard::cli
