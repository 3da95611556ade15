// SPDX-License-Identifier: Apache-2.0
// Tables of pointers to the matrices and biases of experts.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "device/cuda/runtime/context.h"
#include "switchyard/experts.h"

namespace switchyard::cuda {

// Selects one of the tensors of an expert.
template <typename View>
using Member = View BasicExpertTensors<View>::*;
using Weight = Member<ConstTensorView>;
using Gradient = Member<TensorView>;

template <typename View>
std::vector<Member<View>> inner_matrices(const ExpertsOptions& options) {
  using Tensors = BasicExpertTensors<View>;
  if (has_gate(options.activation)) return {&Tensors::gate, &Tensors::up};
  return {&Tensors::up};
}
template <typename View>
std::vector<Member<View>> inner_biases(const ExpertsOptions& options) {
  using Tensors = BasicExpertTensors<View>;
  if (has_gate(options.activation)) return {&Tensors::gate_bias, &Tensors::up_bias};
  return {&Tensors::up_bias};
}

// Returns the parts of all experts: the first part of every expert, then the next part.
template <typename View>
std::vector<View> views_of(std::span<const BasicExpertTensors<View>> experts,
                           const std::vector<Member<View>>& parts) {
  std::vector<View> views;
  for (const auto part : parts) {
    for (const auto& expert : experts) views.push_back(expert.*part);
  }
  return views;
}

template <typename View>
std::vector<MatrixRef> refs_to(const std::vector<View>& views) {
  std::vector<MatrixRef> refs;
  for (const View& view : views) {
    refs.push_back({const_cast<std::byte*>(view.data()), view.row_stride()});
  }
  return refs;
}

inline std::vector<MatrixRef> refs_of(std::span<const ExpertWeights> experts,
                                      const std::vector<Weight>& parts) {
  return refs_to(views_of(experts, parts));
}

// Returns an empty table if no expert has a bias.
inline std::vector<MatrixRef> bias_refs_of(std::span<const ExpertWeights> experts,
                                           const std::vector<Weight>& parts) {
  auto refs = refs_of(experts, parts);
  const auto is_none = [](const MatrixRef& ref) { return ref.data == nullptr; };
  if (std::ranges::all_of(refs, is_none)) refs.clear();
  return refs;
}

}  // namespace switchyard::cuda
