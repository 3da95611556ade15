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

enum class Activation {
  swiglu,  // silu(gate) · up
  // g · sigmoid(alpha · g) · (u + offset) with g = min(gate, limit), u = clamp(up, ±limit)
  clamped_swiglu,
  limited_swiglu,  // min(silu(gate), limit) · clamp(up, ±limit)
  geglu,           // gelu(gate) · up
  geglu_tanh,      // gelu_tanh(gate) · up
  reglu,           // relu(gate) · up
  gelu,            // up alone: u · Φ(u), exactly
  gelu_tanh,       // up alone: its approximation by tanh
  relu,            // up alone
  relu2,           // up alone: relu(u)²
  silu,            // up alone
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
SWITCHYARD_API std::string_view name_of(Activation activation);

// Where a row's routing weight w enters.
enum class WeightStage {
  output,      // w · expert(x), multiplied when rows are combined
  activation,  // the same number, multiplied before the down projection
  input,       // expert(w · x): another function (TorchTitan's score_before_experts)
};
SWITCHYARD_API std::string_view name_of(WeightStage stage);

struct ExpertsOptions {
  std::int64_t hidden = 0;        // H
  std::int64_t intermediate = 0;  // I
  Dtype dtype = Dtype::f32;       // of rows and weights: f32 or bf16
  Activation activation = Activation::swiglu;
  WeightStage weight_stage = WeightStage::output;
  float clamp_limit = 7.0F;  // for clamped_swiglu and limited_swiglu; may be infinite
  // For clamped_swiglu: 1.702 and 1 in gpt-oss and MiniMax-M3, 1 and 0 in DeepSeek-V4.
  float gate_alpha = 1.702F;
  float up_offset = 1.0F;

  // Values that a row leaves for backward: 2I with a gate, I without.
  std::int64_t inner_width() const {
    return has_gate(activation) ? 2 * intermediate : intermediate;
  }
};

// One expert. Matrices are (out, in) with any row stride, so that views into packed, interleaved or
// separate storage are used where they lie. A default view is none: no gate, no bias.
template <typename View>
struct BasicExpertTensors {
  View gate = {};       // [I, H]
  View up = {};         // [I, H]
  View down = {};       // [H, I]
  View gate_bias = {};  // [I]
  View up_bias = {};    // [I]
  View down_bias = {};  // [H]
};
using ExpertWeights = BasicExpertTensors<ConstTensorView>;
using ExpertViews = BasicExpertTensors<TensorView>;  // to be read and written
// Views that receive gradients, of the weights' dtype or f32.
using ExpertGradients = ExpertViews;

// The experts of packed tensors: gate_up [e, 2I, H] (the gates first), or [e, I, H] without gates;
// down [e, H, I]; biases [e, 2I] and [e, H], or none. Views, not copies.
template <typename View>
struct BasicPackedExperts {
  View gate_up = {};
  View down = {};
  View gate_up_bias = {};
  View down_bias = {};
};
using PackedExperts = BasicPackedExperts<ConstTensorView>;
using PackedExpertViews = BasicPackedExperts<TensorView>;
SWITCHYARD_API std::vector<ExpertWeights> unpack(const PackedExperts& packed,
                                                 Activation activation = Activation::swiglu);
SWITCHYARD_API std::vector<ExpertViews> unpack(const PackedExpertViews& packed,
                                               Activation activation = Activation::swiglu);

// Which rows are whose: those of the plan, or of a foreign dispatcher.
struct RowGroups {
  ConstTensorView row_offsets;  // [e + 1] i32: where each group begins
  ConstTensorView group_rows;   // [e] i32: its rows before padding
  std::int64_t alignment = 1;   // that every group begins at a multiple of

  SWITCHYARD_API static RowGroups of(const Plan& plan);
};

// Rows that are read from their tokens, and never made: only where Experts::reads_tokens. What is
// called [R] of a row is then [T, K] of its assignment, and what is [R, H] of a row [T, H].
struct TokenRows {
  ConstTensorView x;            // [T, H]
  ConstTensorView row_sources;  // [R] i32: the assignment t·K + k of every row (Plan::row_sources)
  std::int64_t top_k = 1;       // K
};

// R rows; those beyond the groups, and pads, are neither read nor written. All tensors are in the
// device's memory. On a GPU nobody checks what groups hold, and all tensors have the R rows of
// `rows`, or of `row_sources`, or more.
struct ExpertsInput {
  ConstTensorView rows = {};  // [R, H]; none with `tokens`
  // [R] f32, where the stage wants them here; with `tokens` [T, K], contiguous.
  std::optional<ConstTensorView> row_weights = {};
  std::optional<TokenRows> tokens = {};
};
struct ExpertsOutput {
  TensorView out;                        // [R, H]; may be the memory of rows
  std::optional<TensorView> inner = {};  // [R, inner_width] for backward; none: nothing is kept
};

// Whether `inner` holds forward's values when backward begins, or backward computes them again.
enum class InnerRows { kept, to_be_computed };

// For the stages output and activation d_out is the gradient of w · out, unweighted: row d_y[t].
struct ExpertsBackwardInput {
  TensorView rows = {};                             // [R, H] as in forward, used up; or `tokens`
  std::optional<ConstTensorView> row_weights = {};  // [R] f32, with `tokens` [T, K]; none: 1
  TensorView inner;                                 // [R, inner_width]; used up
  InnerRows inner_rows = InnerRows::kept;
  ConstTensorView d_out;  // [R, H]; with `tokens` d_y [T, H]
  std::optional<TokenRows> tokens = {};
};
struct ExpertsBackwardOutput {
  TensorView d_rows;  // [R, H]
  // [R] f32; with `tokens` [T, K], where assignments without a row are left as they are.
  std::optional<TensorView> d_row_weights = {};
  std::span<const ExpertGradients> gradients;  // [e]; none: the experts are frozen
  GradientMode mode = GradientMode::overwrite;
};

// Not collective. Every choice of how a group is computed depends on its rows, the sizes of the
// matrices and which biases there are alone, so the bits of a group's results do not depend on what
// else is on this rank; for that, biases are given for all experts of a layer or for none.
class SWITCHYARD_API Experts {
 public:
  explicit Experts(const ExpertsOptions& options, Device device = {});
  Experts(const Experts&) = default;  // and no move, which would leave half of them behind
  Experts& operator=(const Experts&) = default;

  void forward(std::span<const ExpertWeights> weights, const RowGroups& groups,
               const ExpertsInput& in, const ExpertsOutput& out) const;
  void backward(std::span<const ExpertWeights> weights, const RowGroups& groups,
                const ExpertsBackwardInput& in, const ExpertsBackwardOutput& out) const;

  // Throw InvalidArgument, naming the expert, if weights do not fit the options, or gradients the
  // weights, or they are not in the device's memory.
  void check(std::span<const ExpertWeights> weights) const;
  void check(std::span<const ExpertWeights> weights,
             std::span<const ExpertGradients> gradients) const;

  // Over all calls and threads so far: in matrix products, and in everything else.
  struct Seconds {
    double gemm = 0.0;
    double other = 0.0;
  };
  Seconds seconds_spent() const;

  // Whether these experts can read their rows from tokens; depends on the device, sizes, dtype,
  // options and which weights there are. The bits of all results are those of rows.
  bool reads_tokens(std::span<const ExpertWeights> weights) const;

  // What groups must be aligned to on this device.
  std::int64_t required_alignment() const { return 1; }
  const ExpertsOptions& options() const { return options_; }

 private:
  // Checks weights and groups; how many rows tensors must have.
  std::int64_t checked_rows(std::span<const ExpertWeights> weights, const RowGroups& groups,
                            const ConstTensorView& rows) const;

  ExpertsOptions options_;
  Device device_;
  std::shared_ptr<WorkTimes> times_;
};

}  // namespace switchyard
