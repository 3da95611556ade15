// The contract of a device: one function a kernel, the same meaning on every device.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "switchyard/capacity.h"
#include "switchyard/experts.h"
#include "switchyard/matmul.h"
#include "switchyard/router.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The first assignment that cannot be planned; token −1: there is none.
struct BadId {
  std::int64_t token = -1;
  std::int64_t k = 0;
  std::int64_t id = 0;
  bool is_duplicate = false;  // rather than out of range
};

struct CountAssignments {
  ConstTensorView expert_ids;            // [T, K] i32
  std::span<const std::int32_t> owners;  // [E]
  bool allow_duplicates = false;
  std::span<std::int32_t> counts;           // out [E]
  std::span<std::int32_t> distinct_tokens;  // out [ranks]
  // out [T·K]: how many assignments of this rank to the same expert came before; −1 for no pick and
  // for bad ids
  std::span<std::int32_t> positions;
};

struct AssignSlots {
  ConstTensorView expert_ids;                    // [T, K] i32
  std::span<const std::int32_t> owners;          // [E]
  std::span<const std::int32_t> row_offsets;     // [E] where each expert's group begins
  std::span<const std::int32_t> rows_before;     // [E] assignments of lower ranks to each expert
  std::span<const std::int32_t> kept_rows;       // [E] rows that each expert has room for
  std::span<const std::int32_t> source_offsets;  // [E + 1] exclusive prefix sum of own counts
  // in: positions, as counted; out: slots [T·K], −1 where there is no room or no pick
  std::span<std::int32_t> slots;
  std::span<std::int32_t> target_ranks;  // out [T·K], −1 for no pick
  std::span<std::int32_t> sources;       // out [Σ own counts]
};

// Names rows: entry (i, j) is row slots[i · width + j] of buffer buffers[i · width + j]; a slot
// below 0 names none. Without `buffers` all rows are in the first.
struct RowTable {
  std::int64_t count = 0;
  std::int64_t width = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* buffers = nullptr;
  std::span<std::byte* const> bases;  // each contiguous rows
};

struct ScatterRows {
  ConstTensorView from;          // [count, H]
  const float* scale = nullptr;  // [count · width] or none
  RowTable to;
};

struct GatherRows {
  RowTable from;
  const float* weights = nullptr;  // [count · width] or none
  TensorView to;                   // [count, H]
};

struct DotRows {
  ConstTensorView with;  // [count, H]
  RowTable rows;
  float* dots = nullptr;  // out [count · width]; 0 where the table names no row
};

struct RouteTokens {
  const RouterOptions& options;
  const RouterWeights& weights;
  const RouterInput& in;
  TensorView expert_ids;       // out [T, K]
  TensorView routing_weights;  // out [T, K]
};

struct RouteTokensBackward {
  const RouterOptions& options;
  const RouterWeights& weights;
  const RouterBackwardInput& in;
  const RouterBackwardOutput& out;
};

// An expert takes at most `most_picks` of this rank's assignments: for each k by itself, or in all.
struct LimitPicks {
  ConstTensorView expert_ids;  // [T, K] i32
  ConstTensorView weights;     // [T, K] f32
  CapacityRule rule;
  std::int64_t most_picks = 0;
  int num_experts = 0;
  TensorView kept_ids;  // out [T, K] i32: −1 for those beyond it
};

// Where the time of the experts went, over all threads.
struct WorkTimes {
  std::atomic<std::int64_t> gemm_ns{0};
  std::atomic<std::int64_t> other_ns{0};
};

struct ExpertsForward {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;     // [e]
  std::span<const std::int32_t> row_offsets;  // [e + 1]
  std::span<const std::int32_t> group_rows;   // [e]
  const ExpertsInput& in;
  const ExpertsOutput& out;
  WorkTimes* times = nullptr;
};

struct ExpertsBackward {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;
  std::span<const std::int32_t> row_offsets;
  std::span<const std::int32_t> group_rows;
  const ExpertsBackwardInput& in;
  const ExpertsBackwardOutput& out;
  WorkTimes* times = nullptr;
};

// One expert that every token visits.
struct SharedForward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;                      // [T, H]
  std::optional<TensorView> hidden = {};  // out [T, hidden_width]: kept for backward
  TensorView y;                           // [T, H]: added to
};
struct SharedBackward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;
  TensorView hidden;  // [T, hidden_width]; used up
  HiddenRows hidden_rows = HiddenRows::kept;
  ConstTensorView d_y;  // [T, H]
  TensorView d_x;       // [T, H]: added to
  const ExpertGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  // Counts, positions and distinct tokens in one pass over the ids.
  virtual BadId count_assignments(const CountAssignments& args) const = 0;
  // The slot of every assignment and its inverse, in (token, k) order.
  virtual void assign_slots(const AssignSlots& args) const = 0;
  // row(i, j) = [scale(i, j) ·] from[i]: a row is read once and written to all its places.
  virtual void scatter_rows(const ScatterRows& args) const = 0;
  // to[i] = Σ_j [weights(i, j) ·] row(i, j): in f32, j in order, rounded once; 0 for no rows.
  virtual void gather_rows(const GatherRows& args) const = 0;
  // dots(i, j) = ⟨with[i], row(i, j)⟩ in f32, in an order that depends on H alone.
  virtual void dot_rows(const DotRows& args) const = 0;

  // Scores, choice and weights of every token; returns the first token whose logits are not finite.
  // Padding and such tokens have no picks and are in no sum.
  virtual std::int64_t route_tokens(const RouteTokens& args) const = 0;
  virtual void route_tokens_backward(const RouteTokensBackward& args) const = 0;
  // What is left of the picks; returns how many were dropped. Equal weights: the lower token stays.
  virtual std::int64_t limit_picks(const LimitPicks& args) const = 0;
  // Every group through its expert. Bits depend on a group's rows and the matrices' sizes alone.
  virtual void experts_forward(const ExpertsForward& args) const = 0;
  virtual void experts_backward(const ExpertsBackward& args) const = 0;
  // Every token through one expert. A token's bits depend on nothing but the token.
  virtual void shared_forward(const SharedForward& args) const = 0;
  virtual void shared_backward(const SharedBackward& args) const = 0;

  // Products that fit, in any order. Bits depend on a product's sizes, strides and dtypes alone.
  virtual void multiply(std::span<const Matmul> products) const = 0;
  // piece(first, last) over parts of 0 … count − 1, on all threads.
  virtual void split(std::int64_t count,
                     const std::function<void(std::int64_t, std::int64_t)>& piece) const = 0;

  // Uninitialised memory, kept for reuse when the last view of it is gone.
  virtual TensorView take(const Shape& shape, Dtype dtype) const = 0;
  virtual std::int64_t bytes_held() const = 0;
  virtual int num_threads() const = 0;
};

}  // namespace switchyard
