// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/block_tensors.h"

#include "core/require.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

bool has_rows_of(const Shape& packed, const Shape& shape) {
  if (packed.rank() != shape.rank() + 1) return false;
  for (int i = 0; i < shape.rank(); ++i) {
    if (packed[i + 1] != shape[i]) return false;
  }
  return true;
}

bool is_loadable(Dtype dtype) { return is_real(dtype) || dtype == Dtype::f16; }

}  // namespace

BlockTensors::BlockTensors(const TensorSource& tensors, std::string_view prefix,
                           const ExpertPlacement& placement, int rank)
    : tensors_(tensors), prefix_(prefix), num_experts_(placement.num_experts()) {
  require(0 <= rank && rank < placement.num_ranks(), "rank ({}) must be 0 to {}", rank,
          placement.num_ranks() - 1);
  ids_ = placement.experts_of(rank);
}

std::string_view BlockTensors::first_of(std::initializer_list<std::string_view> names) const {
  std::vector<std::string> missing;
  for (const auto name : names) {
    if (has(name)) return name;
    missing.push_back(full(name));
  }
  throw InvalidArgument(fmt::format("there is no tensor {}", fmt::join(missing, " or ")));
}

std::int64_t BlockTensors::extent(std::string_view name, int num_extents, int dim) const {
  const auto shape = at(name).shape();
  require(shape.rank() == num_extents, "{} is {}, but must have {} extents", full(name), shape,
          num_extents);
  return shape[dim];
}

ConstTensorView BlockTensors::get(std::string_view name, const Shape& shape) const {
  auto view = at(name);
  require(is_given(view), "{} {} is missing", full(name), shape);
  require(is_loadable(view.dtype()) && view.shape() == shape,
          "{} is {} {}, but must be {} of f32, bf16 or f16", full(name), name_of(view.dtype()),
          view.shape(), shape);
  return view;
}

std::vector<ConstTensorView> BlockTensors::slices(std::string_view name, const Shape& shape) const {
  const auto view = at(name);
  const auto num_own = static_cast<std::int64_t>(ids_.size());
  require(is_loadable(view.dtype()) && (view.rows() == num_experts_ || view.rows() == num_own) &&
              has_rows_of(view.shape(), shape),
          "{} is {} {}, but must hold {} of f32, bf16 or f16 for each of all {} experts, or of "
          "this rank's {}",
          full(name), name_of(view.dtype()), view.shape(), shape, num_experts_, num_own);
  std::vector<ConstTensorView> result;
  for (std::int64_t i = 0; i < num_own; ++i) {
    const auto row = view.rows() == num_own ? i : ids_[static_cast<std::size_t>(i)];
    result.emplace_back(view.row(row), view.dtype(), shape, shape.row_elements(), view.owner(),
                        view.memory());
  }
  return result;
}

ExpertWeights BlockTensors::expert(const std::string& stem, const MatrixNames& names,
                                   std::int64_t hidden) const {
  const auto weight = [&](std::string_view name) { return fmt::format("{}{}.weight", stem, name); };
  const auto bias = [&](std::string_view name) { return fmt::format("{}{}.bias", stem, name); };
  const auto intermediate = extent(weight(names.up), 2, 0);
  const Shape shape{intermediate, hidden};
  return {.gate = get_if_there(weight(names.gate), shape),
          .up = get(weight(names.up), shape),
          .down = get(weight(names.down), {hidden, intermediate}),
          .gate_bias = get_if_there(bias(names.gate), {intermediate}),
          .up_bias = get_if_there(bias(names.up), {intermediate}),
          .down_bias = get_if_there(bias(names.down), {hidden})};
}

std::vector<ExpertWeights> BlockTensors::separate_experts(const MatrixNames& names,
                                                          std::int64_t hidden) const {
  std::vector<ExpertWeights> experts;
  for (const auto id : ids_) {
    experts.push_back(expert(fmt::format("experts.{}.", id), names, hidden));
    require(is_given(experts.back().gate) == is_given(experts.front().gate),
            "{}experts.{} has {} gate, but expert {} has {}", prefix_, id,
            is_given(experts.back().gate) ? "a" : "no", ids_.front(),
            is_given(experts.front().gate) ? "one" : "none");
  }
  return experts;
}

}  // namespace switchyard
