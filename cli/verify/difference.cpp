// SPDX-License-Identifier: Apache-2.0
#include "verify/difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr double kTolerance = 1e-5;
constexpr double kLooseTolerance = 1e-4;
constexpr double kFloor = 1e-6;  // times ‖dx‖₂

void require_same(const std::string& tensor, const ConstTensorView& ours,
                  const ConstTensorView& recorded, Dtype dtype) {
  if (recorded.dtype() == dtype && ours.shape() == recorded.shape()) return;
  throw InvalidArgument(fmt::format("{} is recorded as {} {}, but ours is {} {}", tensor,
                                    name_of(recorded.dtype()), recorded.shape().to_string(),
                                    name_of(dtype), ours.shape().to_string()));
}

// Judges a difference by its rule; `dx_squared` is the recorded ‖dx‖₂².
Comparison judge(const Difference& difference, double dx_squared) {
  Comparison result{.tensor = difference.tensor,
                    .error = std::sqrt(difference.error_squared),
                    .recorded = std::sqrt(difference.recorded_squared)};
  if (difference.rule == Rule::equal) return result;
  const double floor = kFloor * std::sqrt(dx_squared);
  result.allowed =
      (difference.rule == Rule::near_small ? kLooseTolerance : kTolerance) * result.recorded;
  if (difference.rule == Rule::near_or_noise || result.recorded == 0.0) {
    result.by_floor = result.allowed < floor && !(result.error <= result.allowed);
    result.allowed = std::max(result.allowed, floor);
  }
  return result;
}

// Returns the error as a fraction of what is allowed.
double badness(const Comparison& c) {
  if (c.error == 0.0) return 0.0;
  const double part = c.error / c.allowed;
  return std::isnan(part) ? std::numeric_limits<double>::infinity() : part;
}

std::vector<Comparison> judge_all(const std::vector<Difference>& differences) {
  const auto dx = std::find_if(differences.begin(), differences.end(),
                               [](const Difference& d) { return d.tensor == "dx"; });
  std::vector<Comparison> result;
  for (const Difference& d : differences) result.push_back(judge(d, dx->recorded_squared));
  return result;
}

}  // namespace

Difference& Differences::named(const std::string& tensor, Rule rule) {
  const auto found =
      std::find_if(all_.begin(), all_.end(), [&](const auto& d) { return d.tensor == tensor; });
  return found != all_.end() ? *found : all_.emplace_back(Difference{tensor, rule});
}

void Differences::add(const std::string& tensor, const ConstTensorView& ours,
                      const ConstTensorView& recorded, Rule rule) {
  Difference& difference = named(tensor, rule);
  if (ours.data() == nullptr && recorded.data() == nullptr) return;
  require_same(tensor, ours, recorded, Dtype::f32);
  for (std::int64_t r = 0; r < ours.rows(); ++r) {
    const auto a = ours.slice(r, r + 1).span<float>();
    const auto b = recorded.slice(r, r + 1).span<float>();
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double error = double{a[i]} - double{b[i]};
      difference.error_squared += error * error;
      difference.recorded_squared += double{b[i]} * double{b[i]};
    }
  }
}

void Differences::add_ids(const std::string& tensor, const Tensor& ours,
                          const ConstTensorView& recorded) {
  Difference& difference = named(tensor, Rule::equal);
  require_same(tensor, ours, recorded, Dtype::i64);
  const auto a = ours.span<std::int32_t>();
  const auto b = recorded.span<std::int64_t>();
  double differing = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) differing += a[i] != b[i] ? 1.0 : 0.0;
  difference.error_squared = differing * differing;
}

std::vector<Comparison> judge_sum(const RankDifferences& by_rank) {
  auto sum = by_rank.front();
  for (std::size_t r = 1; r < by_rank.size(); ++r) {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i].error_squared += by_rank[r][i].error_squared;
      sum[i].recorded_squared += by_rank[r][i].recorded_squared;
    }
  }
  return judge_all(sum);
}

std::vector<Comparison> judge_worst(const RankDifferences& by_rank) {
  auto result = judge_all(by_rank.front());
  for (auto& comparison : result) comparison.rank = 0;
  for (std::size_t r = 1; r < by_rank.size(); ++r) {
    const auto comparisons = judge_all(by_rank[r]);
    for (std::size_t i = 0; i < comparisons.size(); ++i) {
      if (badness(comparisons[i]) <= badness(result[i])) continue;
      result[i] = comparisons[i];
      result[i].rank = static_cast<int>(r);
    }
  }
  return result;
}

}  // namespace switchyard::cli
