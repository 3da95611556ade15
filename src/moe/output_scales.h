// What GradientScale multiplies outputs of experts with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "switchyard/capacity.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard {

// By expert, from the picks [E] of all ranks that count; 1 for experts without any.
std::vector<float> output_scales(GradientScale rule, std::span<const std::int64_t> picks,
                                 const ExpertPlacement& placement);

// weights[t, k] · scales[expert_ids[t, k]]
Tensor scaled(const Tensor& weights, const Tensor& expert_ids, std::span<const float> scales);
// The same in place, for gradients; nothing without scales.
void scale_weight_gradients(const Tensor& expert_ids, std::span<const float> scales,
                            const TensorView& d_weights);

}  // namespace switchyard
