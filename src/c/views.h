// SPDX-License-Identifier: Apache-2.0
// Views of the tensors that the C interface is given.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "core/require.h"
#include "switchyard/c/switchyard.h"
#include "switchyard/device.h"
#include "switchyard/experts.h"
#include "switchyard/local_plan.h"
#include "switchyard/router.h"
#include "switchyard/tensor.h"

namespace switchyard::c {

inline Dtype dtype_of(std::int64_t dtype) {
  require(0 <= dtype && dtype <= switchyard_i64, "there is no dtype {}", dtype);
  return static_cast<Dtype>(dtype);
}

// Returns a view of a contiguous tensor. Throws if `data` is null and the tensor is not empty.
inline TensorView view_of(void* data, Dtype dtype, const Shape& shape, const Device& device,
                          std::string_view name) {
  require(data != nullptr || shape.num_elements() == 0, "{} is a null pointer", name);
  return {static_cast<std::byte*>(data), dtype,   shape,
          shape.row_elements(),          nullptr, device.memory()};
}
inline ConstTensorView view_of(const void* data, Dtype dtype, const Shape& shape,
                               const Device& device, std::string_view name) {
  return view_of(const_cast<void*>(data), dtype, shape, device, name);
}

ExpertsOptions experts_options(const switchyard_experts_form& form);
std::vector<ExpertWeights> weights_of(const ExpertsOptions& options, std::int64_t num_experts,
                                      const switchyard_experts& packed, const Device& device);
// Returns an empty list if the experts are frozen.
std::vector<ExpertGradients> gradients_of(const ExpertsOptions& options, std::int64_t num_experts,
                                          const switchyard_experts& packed, const Device& device);
RouterOptions router_options(const switchyard_router_form& form);
LocalPlanOptions options_of(const switchyard_plan_form& form);
LocalPlan plan_of(const Device& device, const switchyard_plan_form& form, const void* plan);

}  // namespace switchyard::c
