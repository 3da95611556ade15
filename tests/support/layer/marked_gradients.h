// SPDX-License-Identifier: Apache-2.0
// Gradients whose values identify the ranks.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "support/reference/cut.h"
#include "switchyard/mesh.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing {

inline Tensor filled(const Shape& shape, float value) {
  Tensor result(shape, Dtype::f32);
  std::ranges::fill(result.span<float>(), value);
  return result;
}

inline bool is_filled(const TensorView& view, float value) {
  return same_bits(copy_of(view), filled(view.shape(), value));
}

inline void fill(const TensorView& view, float value) {
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    std::ranges::fill(view.slice(r, r + 1).span<float>(), value);
  }
}

inline void for_each_tensor(const ExpertGradients& expert,
                            const std::function<void(TensorView)>& fn) {
  for (const auto& [name, view] : named_tensors(expert)) {
    if (view.data() != nullptr) fn(view);
  }
}

// Returns 2^rank, so that a sum shows which ranks contributed.
inline float mark_of(int rank) { return static_cast<float>(1 << rank); }

// Divides seven experts over the EP ranks: unevenly, and with eight ranks some own none.
inline MoeParameters gradients_of(Mesh& mesh, const std::vector<std::string>& experts) {
  auto options = tiny_layer_options();
  options.router.num_experts = 7;
  options.shared_intermediate = 3;
  Communicator& comm = mesh.comm(experts);
  MoeParameters gradients(options, ExpertPlacement::contiguous(7, comm.size()), comm.rank(),
                          Biases::all);
  const auto views = gradients.views();
  const auto fill_it = [&](const TensorView& view) { fill(view, mark_of(mesh.world().rank())); };
  fill_it(views.router.gate);
  fill_it(views.router.gate_bias);
  for_each_tensor(views.shared, fill_it);
  for (const auto& expert : views.experts) for_each_tensor(expert, fill_it);
  return gradients;
}

}  // namespace switchyard::testing
