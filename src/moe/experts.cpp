// Checks of weights and rows; the work is the device's.
#include "switchyard/experts.h"

#include <array>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_tensors.h"

namespace switchyard {
namespace {

template <typename View>
View matrix_of(const View& packed, std::int64_t expert, std::int64_t first, std::int64_t rows) {
  const auto columns = packed.shape()[2];
  return {packed.row(expert) + first * columns * size_of(packed.dtype()),
          packed.dtype(),
          {rows, columns},
          columns,
          packed.owner()};
}

template <typename View>
View vector_of(const View& packed, std::int64_t expert, std::int64_t first, std::int64_t size) {
  return {packed.row(expert) + first * size_of(packed.dtype()),
          packed.dtype(),
          {size},
          1,
          packed.owner()};
}

template <typename View>
std::vector<BasicExpertTensors<View>> unpack_views(const BasicPackedExperts<View>& packed,
                                                   Activation activation) {
  const auto& up = packed.gate_up.shape();
  const auto& down = packed.down.shape();
  const int parts = has_gate(activation) ? 2 : 1;
  require(up.rank() == 3 && down.rank() == 3 && up[0] == down[0] && up[1] == parts * down[2] &&
              up[2] == down[1],
          "gate_up {} and down {} do not belong together: they are [e, {}, H] and [e, H, I]",
          up.to_string(), down.to_string(), parts == 2 ? "2I" : "I");
  const auto intermediate = down[2];
  const Shape up_bias{up[0], up[1]};
  const Shape down_bias{down[0], down[1]};
  require(!is_given(packed.gate_up_bias) || packed.gate_up_bias.shape() == up_bias,
          "gate_up_bias is {}, but must be {}", packed.gate_up_bias.shape().to_string(),
          up_bias.to_string());
  require(!is_given(packed.down_bias) || packed.down_bias.shape() == down_bias,
          "down_bias is {}, but must be {}", packed.down_bias.shape().to_string(),
          down_bias.to_string());
  std::vector<BasicExpertTensors<View>> experts;
  for (std::int64_t e = 0; e < up[0]; ++e) {
    BasicExpertTensors<View> expert;
    const auto up_row = parts == 2 ? intermediate : 0;
    if (parts == 2) expert.gate = matrix_of(packed.gate_up, e, 0, intermediate);
    expert.up = matrix_of(packed.gate_up, e, up_row, intermediate);
    expert.down = matrix_of(packed.down, e, 0, down[1]);
    if (is_given(packed.gate_up_bias)) {
      if (parts == 2) expert.gate_bias = vector_of(packed.gate_up_bias, e, 0, intermediate);
      expert.up_bias = vector_of(packed.gate_up_bias, e, up_row, intermediate);
    }
    if (is_given(packed.down_bias)) expert.down_bias = vector_of(packed.down_bias, e, 0, down[1]);
    experts.push_back(expert);
  }
  return experts;
}

void require_rows(const ConstTensorView& view, std::int64_t rows, std::int64_t width, Dtype dtype,
                  std::string_view name) {
  require(view.dtype() == dtype && view.shape().rank() == 2 && view.shape()[1] == width &&
              view.rows() >= rows,
          "{} is {} {}, but must be {} [{},{}] or more rows", name, name_of(view.dtype()),
          view.shape().to_string(), name_of(dtype), rows, width);
}

void require_row_weights(const std::optional<ConstTensorView>& view, std::int64_t rows,
                         std::string_view name) {
  if (!view) return;
  require(view->dtype() == Dtype::f32 && view->shape().rank() == 1 && view->rows() >= rows &&
              view->is_contiguous(),
          "{} is {} {}, but must be contiguous f32 [{}] or more", name, name_of(view->dtype()),
          view->shape().to_string(), rows);
}

// Checks the groups; returns the rows they reach to.
std::int64_t checked_rows(const RowGroups& groups, std::size_t num_experts,
                          std::int64_t required_alignment) {
  const auto experts = static_cast<std::int64_t>(num_experts);
  require(groups.row_offsets.dtype() == Dtype::i32 && groups.group_rows.dtype() == Dtype::i32 &&
              groups.row_offsets.shape() == Shape{experts + 1} &&
              groups.group_rows.shape() == Shape{experts},
          "row_offsets is {} {} and group_rows {} {}, but for {} experts they must be i32 [{}] and "
          "i32 [{}]",
          name_of(groups.row_offsets.dtype()), groups.row_offsets.shape().to_string(),
          name_of(groups.group_rows.dtype()), groups.group_rows.shape().to_string(), experts,
          experts + 1, experts);
  require(groups.alignment > 0 && groups.alignment % required_alignment == 0,
          "groups are aligned to {} rows, but this device's experts need a multiple of {}",
          groups.alignment, required_alignment);
  const auto offsets = groups.row_offsets.span<std::int32_t>();
  const auto rows = groups.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < num_experts; ++e) {
    require(0 <= offsets[e] && 0 <= rows[e] &&
                std::int64_t{rows[e]} <= std::int64_t{offsets[e + 1]} - offsets[e],
            "the group of local expert {} has {} rows, but begins at {} and the next at {}", e,
            rows[e], offsets[e], offsets[e + 1]);
  }
  return offsets.back();
}

}  // namespace

std::string_view name_of(Activation activation) {
  constexpr std::array<std::string_view, 6> kNames{"swiglu",    "clamped_swiglu", "gelu",
                                                   "gelu_tanh", "relu",           "silu"};
  return kNames[static_cast<std::size_t>(activation)];
}

std::string_view name_of(WeightStage stage) {
  constexpr std::array<std::string_view, 3> kNames{"output", "activation", "input"};
  return kNames[static_cast<std::size_t>(stage)];
}

std::vector<ExpertWeights> unpack(const PackedExperts& packed, Activation activation) {
  return unpack_views(packed, activation);
}
std::vector<ExpertGradients> unpack(const PackedExpertGradients& packed, Activation activation) {
  return unpack_views(packed, activation);
}

RowGroups RowGroups::of(const Plan& plan) {
  return {plan.row_offsets(), plan.group_rows(), plan.alignment()};
}

namespace {

std::string name_of_part(std::size_t expert, std::string_view part) {
  return fmt::format("local expert {}'s {}", expert, part);
}

void require_expert(const ExpertsOptions& options, const ExpertWeights& expert, std::size_t index) {
  const Shape inner{options.intermediate, options.hidden};
  const Shape outer{options.hidden, options.intermediate};
  const auto check = [&](const ConstTensorView& view, const Shape& shape, std::string_view part) {
    if (fits(view, shape) && view.dtype() == options.dtype) return;
    const auto name = name_of_part(index, part);
    shape.rank() == 2 ? require_matrix(view, shape, name) : require_vector(view, shape[0], name);
    require(view.dtype() == options.dtype, "{} is {}, but the experts are {}", name,
            name_of(view.dtype()), name_of(options.dtype));
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

void require_expert_gradients(const ExpertWeights& expert, const ExpertGradients& gradients,
                              std::size_t index) {
  const auto check = [&](const TensorView& gradient, const ConstTensorView& weight,
                         std::string_view part) {
    if (gradient_fits(gradient, weight)) return;
    require_gradient(gradient, weight, name_of_part(index, part));
  };
  check(gradients.gate, expert.gate, "gate");
  check(gradients.up, expert.up, "up");
  check(gradients.down, expert.down, "down");
  check(gradients.gate_bias, expert.gate_bias, "gate_bias");
  check(gradients.up_bias, expert.up_bias, "up_bias");
  check(gradients.down_bias, expert.down_bias, "down_bias");
}

}  // namespace

Experts::Experts(const ExpertsOptions& options, Device device)
    : options_(options), device_(std::move(device)), times_(std::make_shared<WorkTimes>()) {
  require(options.hidden > 0, "hidden ({}) must be positive", options.hidden);
  require(options.intermediate > 0, "intermediate ({}) must be positive", options.intermediate);
  require(is_real(options.dtype), "experts are f32 or bf16, not {}", name_of(options.dtype));
  require(options.clamp_limit > 0.0F, "clamp_limit ({}) must be positive", options.clamp_limit);
}

void Experts::check(std::span<const ExpertWeights> weights) const {
  for (std::size_t e = 0; e < weights.size(); ++e) {
    require_expert(options_, weights[e], e);
  }
}

void Experts::check(std::span<const ExpertWeights> weights,
                    std::span<const ExpertGradients> gradients) const {
  require(weights.size() == gradients.size(), "there are {} experts, but gradients for {}",
          weights.size(), gradients.size());
  for (std::size_t e = 0; e < weights.size(); ++e) {
    require_expert_gradients(weights[e], gradients[e], e);
  }
}

Experts::Seconds Experts::seconds_spent() const {
  return {static_cast<double>(times_->gemm_ns) * 1e-9,
          static_cast<double>(times_->other_ns) * 1e-9};
}

void Experts::forward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                      const ExpertsInput& in, const ExpertsOutput& out) const {
  const auto rows = checked_rows(groups, weights.size(), required_alignment());
  check(weights);
  require_rows(in.rows, rows, options_.hidden, options_.dtype, "rows");
  require_rows(out.out, rows, options_.hidden, options_.dtype, "out");
  require_row_weights(in.row_weights, rows, "row_weights");
  if (out.hidden) {
    require_rows(*out.hidden, rows, options_.hidden_width(), options_.dtype, "hidden");
  }
  device_.backend().experts_forward({.options = options_,
                                     .weights = weights,
                                     .row_offsets = groups.row_offsets.span<std::int32_t>(),
                                     .group_rows = groups.group_rows.span<std::int32_t>(),
                                     .in = in,
                                     .out = out,
                                     .times = times_.get()});
}

void Experts::backward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                       const ExpertsBackwardInput& in, const ExpertsBackwardOutput& out) const {
  const auto rows = checked_rows(groups, weights.size(), required_alignment());
  check(weights);
  check(weights, out.gradients);
  require_rows(in.rows, rows, options_.hidden, options_.dtype, "rows");
  require_rows(in.hidden, rows, options_.hidden_width(), options_.dtype, "hidden");
  require_rows(in.d_out, rows, options_.hidden, options_.dtype, "d_out");
  require_rows(out.d_rows, rows, options_.hidden, options_.dtype, "d_rows");
  require_row_weights(in.row_weights, rows, "row_weights");
  if (out.d_row_weights) require_row_weights(*out.d_row_weights, rows, "d_row_weights");
  require_apart(in.d_out, out.d_rows, "d_out and d_rows");
  require_apart(in.rows, out.d_rows, "rows and d_rows");
  require(in.row_weights || !out.d_row_weights,
          "d_row_weights was given without row_weights: there is nothing to differentiate by");
  device_.backend().experts_backward({.options = options_,
                                      .weights = weights,
                                      .row_offsets = groups.row_offsets.span<std::int32_t>(),
                                      .group_rows = groups.group_rows.span<std::int32_t>(),
                                      .in = in,
                                      .out = out,
                                      .times = times_.get()});
}

}  // namespace switchyard
