// SPDX-License-Identifier: Apache-2.0
// Checks weights and rows; the device does the work.
#include "switchyard/experts.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_tensors.h"
#include "switchyard/plan.h"

namespace switchyard {
std::string_view name_of(Activation activation) {
  constexpr std::array<std::string_view, 11> kNames{
      "swiglu", "clamped_swiglu", "limited_swiglu", "geglu", "geglu_tanh", "reglu",
      "gelu",   "gelu_tanh",      "relu",           "relu2", "silu"};
  return kNames[static_cast<std::size_t>(activation)];
}

std::string_view name_of(WeightStage stage) {
  constexpr std::array<std::string_view, 3> kNames{"output", "activation", "input"};
  return kNames[static_cast<std::size_t>(stage)];
}

RowGroups RowGroups::of(const Plan& plan) {
  return {plan.row_offsets(), plan.group_rows(), plan.alignment()};
}

namespace {

std::string name_of_part(std::size_t expert, std::string_view part) {
  return fmt::format("local expert {}'s {}", expert, part);
}

void require_expert(const ExpertsOptions& options, Memory memory, const ExpertWeights& expert,
                    std::size_t index) {
  const Shape inner{options.intermediate, options.hidden};
  const Shape outer{options.hidden, options.intermediate};
  const auto check = [&](const ConstTensorView& view, const Shape& shape, std::string_view part) {
    if (fits(view, shape) && view.dtype() == options.dtype && view.memory() == memory) return;
    const auto name = name_of_part(index, part);
    shape.rank() == 2 ? require_matrix(view, shape, name) : require_vector(view, shape[0], name);
    require(view.dtype() == options.dtype, "{} is {}, but the experts are {}", name,
            name_of(view.dtype()), name_of(options.dtype));
    require_memory(view, memory, name);
  };
  const bool gated = has_gate(options.activation);
  require(gated || (!is_given(expert.gate) && !is_given(expert.gate_bias)),
          "local expert {} has a gate, but its activation, {}, has none", index,
          name_of(options.activation));
  if (gated) check(expert.gate, inner, "gate");
  check(expert.up, inner, "up");
  check(expert.down, outer, "down");
  if (is_given(expert.gate_bias)) check(expert.gate_bias, {options.intermediate}, "gate_bias");
  if (is_given(expert.up_bias)) check(expert.up_bias, {options.intermediate}, "up_bias");
  if (is_given(expert.down_bias)) check(expert.down_bias, {options.hidden}, "down_bias");
}

void require_expert_gradients(Memory memory, const ExpertWeights& expert,
                              const ExpertGradients& gradients, std::size_t index) {
  const auto check = [&](const TensorView& gradient, const ConstTensorView& weight,
                         std::string_view part) {
    if (!is_given(gradient) && !is_given(weight)) return;
    if (gradient_fits(gradient, weight) && gradient.memory() == memory) return;
    require_gradient(gradient, weight, name_of_part(index, part));
    require_memory(gradient, memory, "the gradient of " + name_of_part(index, part));
  };
  check(gradients.gate, expert.gate, "gate");
  check(gradients.up, expert.up, "up");
  check(gradients.down, expert.down, "down");
  check(gradients.gate_bias, expert.gate_bias, "gate_bias");
  check(gradients.up_bias, expert.up_bias, "up_bias");
  check(gradients.down_bias, expert.down_bias, "down_bias");
}

// Checks the tensors of one call.
struct ExpertRowChecks {
  const ExpertsOptions& options;
  Memory memory;
  std::int64_t rows = 0;
  const std::optional<TokenRows>& tokens;

  // Checks that either rows or tokens are given, and that they fit.
  void require_source(const ConstTensorView& given, bool reads_tokens) const {
    if (!tokens) return require_rows(given, options.hidden, "rows");
    require(!is_given(given), "rows {} and tokens were both given: give only one of them",
            given.shape());
    require<Unsupported>(reads_tokens,
                         "these experts cannot read rows from tokens (see Experts::reads_tokens): "
                         "give them rows from Dispatcher::dispatch");
    require(tokens->top_k >= 1, "tokens.top_k ({}) must be positive", tokens->top_k);
    require_of_rows(tokens->row_sources, Dtype::i32, "tokens.row_sources");
    const auto& x = tokens->x;
    require(x.dtype() == options.dtype && x.shape().rank() == 2 && x.shape()[1] == options.hidden,
            "tokens.x is {} {}, but must be {} [T,{}]", name_of(x.dtype()), x.shape(),
            name_of(options.dtype), options.hidden);
    require_memory(x, memory, "tokens.x");
  }

  void require_rows(const ConstTensorView& view, std::int64_t width, std::string_view name) const {
    require(view.dtype() == options.dtype && view.shape().rank() == 2 && view.shape()[1] == width &&
                view.rows() >= rows,
            "{} is {} {}, but must be {} [{},{}] or more rows", name, name_of(view.dtype()),
            view.shape(), name_of(options.dtype), rows, width);
    require_memory(view, memory, name);
  }
  void require_d_out(const ConstTensorView& view) const {
    if (!tokens) return require_rows(view, options.hidden, "d_out");
    require_of_tokens(view, options.dtype, options.hidden, "d_out");
  }
  void require_row_weights(const std::optional<ConstTensorView>& view,
                           std::string_view name) const {
    if (!view) return;
    if (!tokens) return require_of_rows(*view, Dtype::f32, name);
    require_of_tokens(*view, Dtype::f32, tokens->top_k, name);
    require(view->is_contiguous(), "{} has row stride {}, but must be contiguous", name,
            view->row_stride());
  }

 private:
  // Checks a tensor with one number per row.
  void require_of_rows(const ConstTensorView& view, Dtype dtype, std::string_view name) const {
    require(view.dtype() == dtype && view.shape().rank() == 1 && view.rows() >= rows &&
                view.is_contiguous(),
            "{} is {} {}, but must be contiguous {} [{}] or more", name, name_of(view.dtype()),
            view.shape(), name_of(dtype), rows);
    require_memory(view, memory, name);
  }
  void require_of_tokens(const ConstTensorView& view, Dtype dtype, std::int64_t width,
                         std::string_view name) const {
    const Shape shape{tokens->x.rows(), width};
    require(view.dtype() == dtype && view.shape() == shape,
            "{} is {} {}, but for the tokens it must be {} {}", name, name_of(view.dtype()),
            view.shape(), name_of(dtype), shape);
    require_memory(view, memory, name);
  }
};

// Returns the tensor whose length is the number of rows.
template <typename Input>
ConstTensorView row_extent(const Input& in) {
  return in.tokens ? in.tokens->row_sources : ConstTensorView(in.rows);
}

void require_groups(const RowGroups& groups, std::int64_t experts, Memory memory,
                    std::int64_t required_alignment) {
  require(groups.row_offsets.dtype() == Dtype::i32 && groups.group_rows.dtype() == Dtype::i32 &&
              groups.row_offsets.shape() == Shape{experts + 1} &&
              groups.group_rows.shape() == Shape{experts},
          "row_offsets is {} {} and group_rows {} {}, but for {} experts they must be i32 [{}] and "
          "i32 [{}]",
          name_of(groups.row_offsets.dtype()), groups.row_offsets.shape(),
          name_of(groups.group_rows.dtype()), groups.group_rows.shape(), experts, experts + 1,
          experts);
  require_memory(groups.row_offsets, memory, "row_offsets");
  require_memory(groups.group_rows, memory, "group_rows");
  require(groups.alignment > 0 && groups.alignment % required_alignment == 0,
          "groups are aligned to {} rows, but this device's experts need a multiple of {}",
          groups.alignment, required_alignment);
}

// Checks groups in host memory and returns the number of rows that they span.
std::int64_t rows_of(const RowGroups& groups) {
  const auto offsets = groups.row_offsets.span<std::int32_t>();
  const auto rows = groups.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < rows.size(); ++e) {
    require(0 <= offsets[e] && 0 <= rows[e] &&
                std::int64_t{rows[e]} <= std::int64_t{offsets[e + 1]} - offsets[e],
            "the group of local expert {} has {} rows, but begins at {} and the next at {}", e,
            rows[e], offsets[e], offsets[e + 1]);
  }
  return offsets.back();
}

// Sizes up to this limit do not overflow when counted in bytes.
constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max() / 8;

}  // namespace

Experts::Experts(const ExpertsOptions& options, Device device)
    : options_(options), device_(std::move(device)), times_(std::make_shared<WorkTimes>()) {
  require(options.hidden > 0, "hidden ({}) must be positive", options.hidden);
  require(options.intermediate > 0, "intermediate ({}) must be positive", options.intermediate);
  require(options.hidden <= kMostElements / 2 / options.intermediate,
          "hidden ({}) times intermediate ({}) are too many elements to address", options.hidden,
          options.intermediate);
  require(0 <= static_cast<int>(options.activation) &&
              static_cast<int>(options.activation) < kNumActivations,
          "there is no activation {}", static_cast<int>(options.activation));
  require(is_real(options.dtype), "experts are f32 or bf16, not {}", name_of(options.dtype));
  require(options.clamp_limit > 0.0F, "clamp_limit ({}) must be positive", options.clamp_limit);
  require(std::isfinite(options.gate_alpha), "gate_alpha ({}) must be finite", options.gate_alpha);
  require(std::isfinite(options.up_offset), "up_offset ({}) must be finite", options.up_offset);
}

void Experts::check(std::span<const ExpertWeights> weights) const {
  for (std::size_t e = 0; e < weights.size(); ++e) {
    require_expert(options_, device_.memory(), weights[e], e);
  }
}

void Experts::check(std::span<const ExpertWeights> weights,
                    std::span<const ExpertGradients> gradients) const {
  require(weights.size() == gradients.size(), "there are {} experts, but gradients for {}",
          weights.size(), gradients.size());
  for (std::size_t e = 0; e < weights.size(); ++e) {
    require_expert_gradients(device_.memory(), weights[e], gradients[e], e);
  }
}

Experts::Seconds Experts::seconds_spent() const {
  return {static_cast<double>(times_->gemm_ns) * 1e-9,
          static_cast<double>(times_->other_ns) * 1e-9};
}

bool Experts::reads_tokens() const { return backend_of(device_).reads_tokens(options_); }

std::int64_t Experts::checked_rows(std::span<const ExpertWeights> weights, const RowGroups& groups,
                                   const ConstTensorView& rows) const {
  require_groups(groups, static_cast<std::int64_t>(weights.size()), device_.memory(),
                 required_alignment());
  const auto reached = device_.memory() == Memory::host ? rows_of(groups) : rows.rows();
  check(weights);
  return reached;
}

void Experts::forward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                      const ExpertsInput& in, const ExpertsOutput& out) const {
  const ExpertRowChecks expected{options_, device_.memory(),
                                 checked_rows(weights, groups, row_extent(in)), in.tokens};
  expected.require_source(in.rows, in.tokens && reads_tokens());
  expected.require_rows(out.out, options_.hidden, "out");
  expected.require_row_weights(in.row_weights, "row_weights");
  if (out.inner) expected.require_rows(*out.inner, options_.inner_width(), "inner");
  if (in.tokens) require_apart(in.tokens->x, out.out, "tokens.x and out");
  if (in.rows.data() != out.out.data()) require_apart(in.rows, out.out, "rows and out");
  backend_of(device_).experts_forward({.options = options_,
                                       .weights = weights,
                                       .row_offsets = groups.row_offsets,
                                       .group_rows = groups.group_rows,
                                       .in = in,
                                       .out = out,
                                       .times = times_.get()});
}

void Experts::backward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                       const ExpertsBackwardInput& in, const ExpertsBackwardOutput& out) const {
  const ExpertRowChecks expected{options_, device_.memory(),
                                 checked_rows(weights, groups, row_extent(in)), in.tokens};
  if (!out.gradients.empty()) check(weights, out.gradients);
  expected.require_source(in.rows, in.tokens && reads_tokens());
  expected.require_rows(in.inner, options_.inner_width(), "inner");
  expected.require_d_out(in.d_out);
  expected.require_rows(out.d_rows, options_.hidden, "d_rows");
  expected.require_row_weights(in.row_weights, "row_weights");
  if (out.d_row_weights) expected.require_row_weights(*out.d_row_weights, "d_row_weights");
  require_apart(in.d_out, out.d_rows, "d_out and d_rows");
  require_apart(in.rows, out.d_rows, "rows and d_rows");
  if (in.tokens) require_apart(in.tokens->x, out.d_rows, "tokens.x and d_rows");
  require(in.row_weights || !out.d_row_weights,
          "d_row_weights was given without row_weights: give both or neither");
  backend_of(device_).experts_backward({.options = options_,
                                        .weights = weights,
                                        .row_offsets = groups.row_offsets,
                                        .group_rows = groups.group_rows,
                                        .in = in,
                                        .out = out,
                                        .times = times_.get()});
}

}  // namespace switchyard
