// SPDX-License-Identifier: Apache-2.0
// The experts of one rank: two or three matrices each, applied to groups of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

class Plan;
struct WorkTimes;

// The function between the two products of an expert.
enum class Activation {
  swiglu,  // silu(gate) · up
  // g · sigmoid(alpha · g) · (u + offset) with g = min(gate, limit), u = clamp(up, ±limit)
  clamped_swiglu,
  limited_swiglu,  // min(silu(gate), limit) · clamp(up, ±limit)
  geglu,           // gelu(gate) · up
  geglu_tanh,      // gelu_tanh(gate) · up
  reglu,           // relu(gate) · up
  gelu,            // up only: u · Φ(u), exact
  gelu_tanh,       // up only: gelu with the tanh approximation
  relu,            // up only
  relu2,           // up only: relu(u)²
  silu,            // up only
};
constexpr int kNumActivations = 11;
constexpr bool has_gate(Activation activation) {
  switch (activation) {
    case Activation::swiglu:
    case Activation::clamped_swiglu:
    case Activation::limited_swiglu:
    case Activation::geglu:
    case Activation::geglu_tanh:
    case Activation::reglu:
      return true;
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::relu:
    case Activation::relu2:
    case Activation::silu:
      return false;
  }
  return false;
}
// Returns the name of the enumerator.
SWITCHYARD_API std::string_view name_of(Activation activation);

// Selects where a row's routing weight w is applied.
enum class WeightStage {
  output,      // w · expert(x), multiplied when rows are combined
  activation,  // equal in exact arithmetic, multiplied before the down projection
  input,       // expert(w · x), a different function (TorchTitan's score_before_experts)
};
// Returns the name of the enumerator.
SWITCHYARD_API std::string_view name_of(WeightStage stage);

// Options of Experts.
struct ExpertsOptions {
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  Dtype dtype = Dtype::f32;       // dtype of rows and weights: f32 or bf16
  Activation activation = Activation::swiglu;
  WeightStage weight_stage = WeightStage::output;
  float clamp_limit = 7.0F;  // for clamped_swiglu and limited_swiglu; positive, may be infinite
  // For clamped_swiglu: 1.702 and 1 in gpt-oss and MiniMax-M3, 1 and 0 in DeepSeek-V4.
  float gate_alpha = 1.702F;
  float up_offset = 1.0F;

  // The number of values per row that forward keeps for backward: 2I with a gate, I without.
  std::int64_t inner_width() const {
    return has_gate(activation) ? 2 * intermediate : intermediate;
  }
};

// The tensors of one expert. Matrices are (out, in) with any row stride, so views into packed,
// interleaved or separate storage are used in place. Biases are contiguous. A default view means
// that there is no such tensor: no gate, no bias.
template <typename View>
struct BasicExpertTensors {
  View gate = {};       // [I, H]
  View up = {};         // [I, H]
  View down = {};       // [H, I]
  View gate_bias = {};  // [I]
  View up_bias = {};    // [I]
  View down_bias = {};  // [H]
};
// Views to be read.
using ExpertWeights = BasicExpertTensors<ConstTensorView>;
// Views to be read and written.
using ExpertViews = BasicExpertTensors<TensorView>;
// Views that receive gradients, in the dtype of the weights or f32.
using ExpertGradients = ExpertViews;

// The experts of a rank as packed tensors: gate_up [e, 2I, H] (gates first), or [e, I, H] without
// gates; down [e, H, I]; biases [e, 2I] or [e, I], and [e, H], or none. unpack() returns views, not
// copies.
template <typename View>
struct BasicPackedExperts {
  View gate_up = {};
  View down = {};
  View gate_up_bias = {};
  View down_bias = {};
};
// Packed experts to be read; PackedExpertViews are to be read and written.
using PackedExperts = BasicPackedExperts<ConstTensorView>;
using PackedExpertViews = BasicPackedExperts<TensorView>;
// Returns views of the single experts.
SWITCHYARD_API std::vector<ExpertWeights> unpack(const PackedExperts& packed,
                                                 Activation activation = Activation::swiglu);
SWITCHYARD_API std::vector<ExpertViews> unpack(const PackedExpertViews& packed,
                                               Activation activation = Activation::swiglu);

// The rows that belong to each expert, from a Plan or from another dispatcher.
struct RowGroups {
  ConstTensorView row_offsets;  // [e + 1] i32: where each group begins
  ConstTensorView group_rows;   // [e] i32: the rows of each group, without padding
  std::int64_t alignment = 1;   // every group begins at a multiple of it

  // The groups of a plan.
  SWITCHYARD_API static RowGroups of(const Plan& plan);
};

// Rows that are read from their tokens instead of being materialised. Requires
// Experts::reads_tokens. Tensors described below as [R] per row are then [T, K] per assignment, and
// [R, H] per row becomes [T, H] per token.
struct TokenRows {
  ConstTensorView x;            // [T, H]
  ConstTensorView row_sources;  // [R] i32: the assignment t·K + k of every row (Plan::row_sources)
  std::int64_t top_k = 1;       // K
};

// The arguments of Experts::forward, for R rows. Padding rows, and rows beyond the groups, are
// neither read nor written. All tensors are in the device's memory. On a GPU the contents of the
// groups are not checked, and every tensor must have at least the R rows of `rows` or
// `row_sources`.
struct ExpertsInput {
  ConstTensorView rows = {};  // [R, H]; omit if `tokens` is given
  // The routing weights, [R] f32, for the stages activation and input; with `tokens`, [T, K],
  // contiguous.
  std::optional<ConstTensorView> row_weights = {};
  std::optional<TokenRows> tokens = {};
};
// The tensors that Experts::forward writes.
struct ExpertsOutput {
  TensorView out;                        // [R, H]; may be the same memory as rows
  std::optional<TensorView> inner = {};  // [R, inner_width] for backward; none: nothing is kept
};

// Says whether `inner` still holds the values of forward, or backward must recompute them.
enum class InnerRows { kept, to_be_computed };

// The arguments of Experts::backward. For the stages output and activation, d_out is the gradient
// of w · out, that is, d_y[t] not multiplied by w. For the stage input it is the gradient of out.
struct ExpertsBackwardInput {
  TensorView rows = {};  // [R, H] as in forward, overwritten; or use `tokens`
  std::optional<ConstTensorView> row_weights = {};  // [R] f32, with `tokens` [T, K]; none: 1
  TensorView inner;                                 // [R, inner_width]; overwritten
  InnerRows inner_rows = InnerRows::kept;
  ConstTensorView d_out;  // [R, H]; with `tokens`, d_y [T, H]
  std::optional<TokenRows> tokens = {};
};
// The tensors that Experts::backward writes.
struct ExpertsBackwardOutput {
  TensorView d_rows;  // [R, H]
  // The gradients of row_weights, [R] f32; with `tokens`, [T, K], where assignments without a row
  // are left unchanged.
  std::optional<TensorView> d_row_weights = {};
  std::span<const ExpertGradients> gradients;  // [e]; empty: the experts are frozen
  GradientMode mode = GradientMode::overwrite;
};

// Applies the experts of one rank to groups of rows. Not collective. How a group is computed
// depends only on its rows, the sizes of the matrices and which biases exist, so the bits of its
// results do not depend on what else is on this rank. For that to hold, give biases to all experts
// of a layer or to none. Arguments that do not fit throw InvalidArgument.
class SWITCHYARD_API Experts {
 public:
  explicit Experts(const ExpertsOptions& options, Device device = {});
  // Copied even when moved, because a move would leave an unusable object behind.
  Experts(const Experts&) = default;
  Experts& operator=(const Experts&) = default;

  // Computes the rows' outputs. `weights` has one entry per group.
  void forward(std::span<const ExpertWeights> weights, const RowGroups& groups,
               const ExpertsInput& in, const ExpertsOutput& out) const;
  // Computes the gradients of a forward with the same weights and groups.
  void backward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                const ExpertsBackwardInput& in, const ExpertsBackwardOutput& out) const;

  // Throws InvalidArgument, naming the expert if its weights do not fit the options, its gradients
  // do not fit the weights, or either is not in the device's memory.
  void check(std::span<const ExpertWeights> weights) const;
  void check(std::span<const ExpertWeights> weights,
             std::span<const ExpertGradients> gradients) const;

  // Time spent over all calls and threads so far, in matrix products and in everything else. Only
  // CPUs record it.
  struct Seconds {
    double gemm = 0.0;
    double other = 0.0;
  };
  Seconds seconds_spent() const;

  // True if these experts can read their rows from tokens. Depends on the device, the sizes, the
  // dtype and the options. Results have the same bits either way.
  bool reads_tokens() const;

  // The number of rows that groups must be aligned to on this device.
  std::int64_t required_alignment() const { return 1; }
  const ExpertsOptions& options() const { return options_; }

 private:
  // Checks weights and groups, and returns the number of rows that the tensors must have.
  std::int64_t checked_rows(std::span<const ExpertWeights> weights, const RowGroups& groups,
                            const ConstTensorView& rows) const;

  ExpertsOptions options_;
  Device device_;
  std::shared_ptr<WorkTimes> times_;
};

}  // namespace switchyard
