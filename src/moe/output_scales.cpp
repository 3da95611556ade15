#include "moe/output_scales.h"

#include <numeric>

namespace switchyard {
namespace {

double mean_of(std::span<const std::int64_t> picks, std::span<const std::int32_t> experts) {
  std::int64_t rows = 0;
  for (const auto e : experts) rows += picks[static_cast<std::size_t>(e)];
  return static_cast<double>(rows) / static_cast<double>(experts.size());
}

}  // namespace

std::vector<float> output_scales(GradientScale rule, std::span<const std::int64_t> picks,
                                 const ExpertPlacement& placement) {
  std::vector<float> scales(picks.size(), 1.0F);
  const auto total = std::accumulate(picks.begin(), picks.end(), std::int64_t{0});
  for (std::size_t e = 0; e < picks.size(); ++e) {
    if (picks[e] == 0) continue;
    const int owner = placement.owner(static_cast<int>(e));
    const double mean = rule == GradientScale::rank
                            ? mean_of(picks, placement.experts_of(owner))
                            : static_cast<double>(total) / static_cast<double>(picks.size());
    scales[e] = static_cast<float>(mean / static_cast<double>(picks[e]));
  }
  return scales;
}

Tensor scaled(const Tensor& weights, const Tensor& expert_ids, std::span<const float> scales) {
  Tensor result = weights.clone();
  scale_weight_gradients(expert_ids, scales, result);
  return result;
}

void scale_weight_gradients(const Tensor& expert_ids, std::span<const float> scales,
                            const TensorView& d_weights) {
  if (scales.empty()) return;
  const auto ids = expert_ids.span<std::int32_t>();
  const auto values = d_weights.span<float>();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0) values[i] *= scales[static_cast<std::size_t>(ids[i])];
  }
}

}  // namespace switchyard
