// SPDX-License-Identifier: Apache-2.0
#include "support/device/token_problem.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "support/compare.h"

namespace switchyard::testing {

TokenProblem::TokenProblem(const Device& device, const TokenSetup& setup)
    : device_(device),
      setup_(setup),
      comm_(connect()),
      dispatcher_(*comm_, ExpertPlacement::contiguous(setup.picks.num_experts, 1),
                  {.plan = {.hidden = setup.options.hidden,
                            .dtype = Dtype::bf16,
                            .alignment = setup.alignment,
                            .sizing = Sizing::bounded(setup.capacity, Overflow::drop)}},
                  device),
      experts_(setup.options, device),
      expert_ids_(random_.expert_ids(setup.picks)),
      plan_(dispatcher_.plan(device.copy_of(expert_ids_))),
      slots_(device.to_host(plan_.slots())) {
  for (int e = 0; e < setup.picks.num_experts; ++e) {
    weights_.push_back(
        expert_on(device, random_expert(random_, setup.options, setup.biases), setup.storage));
  }
  const Shape shape{num_tokens(), setup.options.hidden};
  const Tensor x = random_.tensor(shape, Dtype::bf16);
  const Tensor d_y = random_.tensor(shape, Dtype::bf16);
  tokens_ = {copy_on(device, x, setup.storage), row_sources(), setup.picks.top_k};
  d_y_ = copy_on(device, d_y, setup.storage);
  token_weights_ = device.copy_of(random_.tensor({num_tokens(), setup.picks.top_k}, Dtype::f32));
  rows_ = poisoned_on(device, {num_rows(), setup.options.hidden}, Dtype::bf16);
  row_weights_ = poisoned_on(device, {num_rows()}, Dtype::f32);
  dispatcher_.dispatch(plan_, {device.copy_of(x), token_weights_}, {rows_, row_weights_});
  d_out_ = dispatcher_.dispatch(plan_, device.copy_of(d_y));
}

std::int64_t TokenProblem::num_dropped() const {
  const auto is_none = [](std::int32_t i) { return i < 0; };
  return std::ranges::count_if(slots_.span<std::int32_t>(), is_none) -
         std::ranges::count_if(expert_ids_.span<std::int32_t>(), is_none);
}

// Builds the table by hand. Rows outside the groups get an invalid source.
TensorView TokenProblem::row_sources() const {
  Tensor sources({num_rows()}, Dtype::i32);
  std::ranges::fill(sources.span<std::int32_t>(), std::numeric_limits<std::int32_t>::max());
  const auto slots = slots_.span<std::int32_t>();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    sources.span<std::int32_t>()[static_cast<std::size_t>(slots[i])] = static_cast<std::int32_t>(i);
  }
  return copy_on(device_, sources);
}

std::vector<ExpertGradients> TokenProblem::gradients_before(const TokenWay& way) const {
  Random random(11);
  std::vector<ExpertGradients> gradients;
  for (const auto& expert : weights_) {
    const auto like = [&](const ConstTensorView& weight, Dtype dtype) -> TensorView {
      if (weight.data() == nullptr) return {};
      return copy_on(device_, random.tensor(weight.shape(), dtype), setup_.storage);
    };
    gradients.push_back({.gate = like(expert.gate, way.gate),
                         .up = like(expert.up, way.up_and_down),
                         .down = like(expert.down, way.up_and_down),
                         .gate_bias = like(expert.gate_bias, way.gate),
                         .up_bias = like(expert.up_bias, way.up_and_down),
                         .down_bias = like(expert.down_bias, way.up_and_down)});
  }
  return gradients;
}

Tensor TokenProblem::of_assignments(const Tensor& d_row_weights) const {
  Tensor result({num_tokens(), setup_.picks.top_k}, Dtype::f32);
  poison(result);
  const auto slots = slots_.span<std::int32_t>();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) continue;
    result.span<float>()[i] = d_row_weights.span<float>()[static_cast<std::size_t>(slots[i])];
  }
  return result;
}

ExpertsResults TokenProblem::run(const TokenWay& way) const {
  const bool from_tokens = way.from_tokens;
  const auto take = [&](std::int64_t width) {
    const auto storage = from_tokens ? setup_.storage : Storage::together;
    return poisoned_on(device_, {num_rows(), width}, Dtype::bf16, storage);
  };
  Tensor rows = device_.copy_of(rows_);
  ExpertsInput in;
  ExpertsBackwardInput d_in;
  d_in.inner = take(setup_.options.inner_width());
  d_in.inner_rows = way.inner_rows;
  if (from_tokens) {
    in.tokens = d_in.tokens = tokens_;
    d_in.d_out = d_y_;
  } else {
    in.rows = d_in.rows = rows;
    d_in.d_out = d_out_;
  }
  const auto gradients = gradients_before(way);
  ExpertsBackwardOutput d{
      .d_rows = take(setup_.options.hidden), .gradients = gradients, .mode = way.mode};
  if (way.has_weights) {
    in.row_weights = from_tokens ? token_weights_.view() : ConstTensorView(row_weights_);
    d_in.row_weights = in.row_weights;
    d.d_row_weights = poisoned_on(device_, in.row_weights->shape(), Dtype::f32);
  }
  ExpertsOutput out{.out = take(setup_.options.hidden)};
  if (way.inner_rows == InnerRows::kept) out.inner = d_in.inner;
  ExpertsResults results;
  experts_.forward(weights_, RowGroups::of(plan_), in, out);
  results.out = device_.to_host(out.out);
  if (out.inner) results.inner = device_.to_host(*out.inner);
  experts_.backward(weights_, RowGroups::of(plan_), d_in, d);
  results.d_rows = device_.to_host(d.d_rows);
  if (d.d_row_weights) {
    Tensor numbers = device_.to_host(*d.d_row_weights);
    results.d_row_weights = from_tokens ? std::move(numbers) : of_assignments(numbers);
  }
  for (const auto& expert : gradients) results.gradients.push_back(gradients_of(device_, expert));
  return results;
}

}  // namespace switchyard::testing
