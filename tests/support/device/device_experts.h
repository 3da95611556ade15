// SPDX-License-Identifier: Apache-2.0
// Experts and their gradients in device memory, with several storage layouts.
#pragma once

#include <optional>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/experts_problem.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/device.h"

namespace switchyard::testing {

constexpr WeightStage kStages[]{WeightStage::output, WeightStage::activation, WeightStage::input};
inline const std::vector<std::int32_t> kGroups{5, 0, 128, 1, 200, 0};

// The clamp is low enough to take effect in f32. In bf16 it is high, since rounding could move
// values across it.
inline ExpertsOptions options_of(std::int64_t hidden, std::int64_t intermediate, Dtype dtype,
                                 Activation activation = Activation::swiglu,
                                 WeightStage stage = WeightStage::output) {
  return {.hidden = hidden,
          .intermediate = intermediate,
          .dtype = dtype,
          .activation = activation,
          .weight_stage = stage,
          .clamp_limit = dtype == Dtype::f32 ? 0.4F : 7.0F};
}

// Tolerance relative to f32 on a CPU. A square doubles the error.
inline double tolerance_of(const ExpertsOptions& options) {
  if (options.dtype == Dtype::f32) return 1e-5;
  return options.activation == Activation::relu2 ? 1.6e-2 : 8e-3;
}

// Rows of a matrix are contiguous, 16 elements apart, or 3 elements apart and thus unaligned.
enum class Storage { together, apart, askew };

inline std::int64_t row_stride_of(std::int64_t width, Storage storage) {
  return storage == Storage::together ? width : width + (storage == Storage::apart ? 16 : 3);
}

// Returns a tensor of NaNs in the device's memory.
inline TensorView poisoned_on(const Device& device, const Shape& shape, Dtype dtype,
                              Storage storage = Storage::together) {
  if (shape.rank() == 1) storage = Storage::together;
  const std::int64_t stride = row_stride_of(shape.row_elements(), storage);
  Tensor host({shape[0], stride}, dtype);
  poison(host);
  Tensor wide = device.copy_of(host);
  const TensorView view = wide.view();
  return {view.data(), dtype, shape, stride, view.owner(), view.memory()};
}

inline TensorView copy_on(const Device& device, const ConstTensorView& host,
                          Storage storage = Storage::together) {
  const TensorView copy = poisoned_on(device, host.shape(), host.dtype(), storage);
  device.copy(host, copy);
  return copy;
}

// Applies `change` to each tensor that is given.
template <typename View, typename Change>
auto map_expert(const BasicExpertTensors<View>& e, Change change) {
  using To = decltype(change(e.up));
  const auto changed = [&](const View& view) {
    return view.data() == nullptr ? To{} : change(view);
  };
  return BasicExpertTensors<To>{changed(e.gate),      changed(e.up),      changed(e.down),
                                changed(e.gate_bias), changed(e.up_bias), changed(e.down_bias)};
}

inline ExpertWeights expert_on(const Device& device, const ExpertWeights& host, Storage storage) {
  return map_expert(host, [&](const ConstTensorView& view) -> ConstTensorView {
    return copy_on(device, view, storage);
  });
}
// Interleaves the rows of gate and up, as gpt-oss does.
inline ExpertWeights interleaved_on(const Device& device, const ExpertWeights& host) {
  ExpertWeights expert = expert_on(device, host, Storage::together);
  const Shape& shape = host.up.shape();
  const TensorView both = poisoned_on(device, {2 * shape[0], shape[1]}, host.up.dtype());
  const auto every_other = [&](std::int64_t first) -> TensorView {
    return {both.row(first), both.dtype(), shape, 2 * shape[1], both.owner(), both.memory()};
  };
  device.copy(host.gate, every_other(0));
  device.copy(host.up, every_other(1));
  expert.gate = every_other(0);
  expert.up = every_other(1);
  return expert;
}
inline ExpertGradients gradients_on(const Device& device, const ExpertGradients& host,
                                    Storage storage) {
  return map_expert(host, [&](const TensorView& view) { return copy_on(device, view, storage); });
}
inline ExpertGradients gradients_of(const Device& device, const ExpertGradients& there) {
  return map_expert(
      there, [&](const TensorView& view) -> TensorView { return device.to_host(view).view(); });
}

// Converts to f32, exactly.
inline Tensor widened(const ConstTensorView& view) { return tensor_of(doubles_of(view)); }
inline ExpertWeights widened(const ExpertWeights& expert) {
  return map_expert(
      expert, [](const ConstTensorView& view) -> ConstTensorView { return widened(view).view(); });
}

// The way to run experts on a device.
struct ExpertsWay {
  Storage storage = Storage::together;
  bool interleaved = false;  // interleave gate and up
  InnerRows inner_rows = InnerRows::kept;
  bool row_weights = true;
  GradientMode mode = GradientMode::overwrite;
  std::vector<ExpertGradients> gradients = {};  // initial; if empty, NaN
  const TokensProblem* tokens = nullptr;        // if set, rows are read from these tokens
  bool frozen = false;                          // compute no weight gradients
};

inline std::vector<ExpertGradients> gradients_to_begin_with(const Device& device,
                                                            const ExpertsProblem& problem,
                                                            const ExpertsWay& way) {
  std::vector<ExpertGradients> gradients;
  for (std::size_t e = 0; e < problem.weights.size(); ++e) {
    gradients.push_back(gradients_on(
        device, way.gradients.empty() ? gradients_for(problem.weights[e]) : way.gradients[e],
        way.storage));
  }
  return gradients;
}

// Uploads every input except `inner`.
inline ExpertsBackwardInput input_on(const Device& device, const ExpertsProblem& problem,
                                     const ExpertsWay& way) {
  const TokensProblem* const tokens = way.tokens;
  ExpertsBackwardInput in{
      .inner = {},
      .inner_rows = way.inner_rows,
      .d_out = copy_on(device, tokens ? tokens->d_y : problem.d_out, way.storage)};
  if (way.row_weights) {
    in.row_weights = copy_on(device, tokens ? tokens->weights : problem.row_weights);
  }
  if (!tokens) {
    in.rows = copy_on(device, problem.rows, way.storage);
    return in;
  }
  in.tokens = TokenRows{.x = copy_on(device, tokens->x, way.storage),
                        .row_sources = copy_on(device, tokens->row_sources),
                        .top_k = tokens->top_k};
  return in;
}

// Runs forward and backward directly through the device backend.
inline ExpertsResults run_experts_on(const Device& device, const ExpertsProblem& problem,
                                     const ExpertsWay& way = {}) {
  const auto& options = problem.options;
  const auto capacity = problem.num_rows();
  const auto take = [&](std::int64_t width) {
    return poisoned_on(device, {capacity, width}, options.dtype, way.storage);
  };
  std::vector<ExpertWeights> weights;
  for (const auto& host : problem.weights) {
    weights.push_back(way.interleaved ? interleaved_on(device, host)
                                      : expert_on(device, host, way.storage));
  }
  const auto gradients =
      way.frozen ? std::vector<ExpertGradients>() : gradients_to_begin_with(device, problem, way);
  ExpertsBackwardInput d_in = input_on(device, problem, way);
  const TensorView offsets = copy_on(device, problem.row_offsets);
  const TensorView counts = copy_on(device, problem.group_rows);
  const ExpertsInput in{.rows = d_in.rows, .row_weights = d_in.row_weights, .tokens = d_in.tokens};
  const ExpertsOutput out{.out = take(options.hidden), .inner = take(options.inner_width())};
  backend_of(device).experts_forward({options, weights, offsets, counts, in, out});
  ExpertsResults results{device.to_host(out.out), device.to_host(*out.inner), {}, {}, {}};

  const bool kept = way.inner_rows == InnerRows::kept;
  d_in.inner = kept ? *out.inner : take(options.inner_width());
  ExpertsBackwardOutput d{.d_rows = take(options.hidden), .gradients = gradients, .mode = way.mode};
  if (d_in.row_weights) {
    d.d_row_weights = poisoned_on(device, d_in.row_weights->shape(), Dtype::f32);
  }
  backend_of(device).experts_backward({options, weights, offsets, counts, d_in, d});
  results.d_rows = device.to_host(d.d_rows);
  if (d.d_row_weights) results.d_row_weights = device.to_host(*d.d_row_weights);
  for (const auto& g : gradients) results.gradients.push_back(gradients_of(device, g));
  return results;
}

}  // namespace switchyard::testing
