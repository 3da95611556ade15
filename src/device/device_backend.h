// The contract of a device: one function a kernel, the same meaning on every device.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "device/peer_memory.h"
#include "device/plan_words.h"
#include "device/router_sums.h"
#include "switchyard/capacity.h"
#include "switchyard/device.h"
#include "switchyard/experts.h"
#include "switchyard/losses.h"
#include "switchyard/matmul.h"
#include "switchyard/router.h"
#include "switchyard/sizing.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Views and pointers are of the device's own memory, unless a comment says host. Sizes that only
// the routing knows are in that memory too, and no function waits for them.

// Ids as callers have them to ids as the other functions read them.
struct NarrowIds {
  ConstTensorView from;  // [T, K] i32 or i64; rows may lie apart
  // Ids from here on become −1; none: they stay. What 32 bits do not hold becomes their highest or
  // lowest number, which is no expert's id either.
  std::optional<std::int64_t> first_sentinel = {};
  TensorView to;  // out [T, K] i32, contiguous
};

struct CountAssignments {
  ConstTensorView expert_ids;  // [T, K] i32
  ConstTensorView owners;      // [E] i32
  bool allow_duplicates = false;
  TensorView counts;           // out [E] i32
  TensorView distinct_tokens;  // out [ranks] i32
  // out [T·K] i32: how many assignments of this rank to the same expert came before; −1 for no pick
  // and for bad ids
  TensorView positions;
  // out [T·K] i32: how many tokens of this rank with a pick at the same rank came before this
  // token; −1 as in positions
  std::optional<TensorView> token_positions = {};
  // [kProblemWords] i64; in: what the router met; out: the first bad id, if that had met none.
  TensorView problems;
};

// Where the groups of all experts lie at their owners, and how much of them there is room for.
struct LayOut {
  ConstTensorView counts;           // [ranks, E] i32 by source rank; rows may lie apart
  ConstTensorView owners;           // [E] i32
  ConstTensorView experts_by_rank;  // [E] i32: the experts of rank 0, then those of rank 1, …
  ConstTensorView rank_offsets;     // [ranks + 1] i32: where those of each rank begin
  int rank = 0;
  std::int64_t alignment = 1;
  Sizing sizing = {};
  TensorView expert_offsets;  // out [E] i32: where each expert's group begins
  TensorView rows_before;     // out [E] i32: of lower ranks, at most what is kept
  TensorView kept_rows;       // out [E] i32: rows that each expert has room for
  TensorView row_offsets;     // out [local + 1] i32: of this rank's experts, and their end
  TensorView group_rows;      // out [local] i32
  TensorView source_offsets;  // out [E + 1] i32: exclusive prefix sum of this rank's counts
  TensorView layout;          // out [layout_words(ranks)] i64
  // Where tokens cross once: [ranks, ranks] i32 by source, then target; rows may lie apart. A rank
  // that has no room for its tokens keeps no rows at all.
  std::optional<ConstTensorView> distinct_tokens = {};
  // out [ranks] i32: where this rank's tokens begin among those that each rank receives
  std::optional<TensorView> token_offsets = {};
  // [ranks, n] i64, rows may lie apart: words that all ranks must have alike; otherwise all counts
  // are taken as 0, and the plan has no rows at all.
  std::optional<ConstTensorView> must_agree = {};
  // The words of the step that the layout, and the problems found, are added to.
  std::optional<ConstTensorView> problems = {};  // [ranks, kProblemWords] i64; rows may lie apart
  std::optional<TensorView> step = {};           // [kStepWords] i64
};

// Where tokens cross once: what this rank writes at the others. A token's place at a rank is where
// it lies among all tokens that the rank receives.
struct SentTokens {
  ConstTensorView positions;  // [T·K] i32: token_positions, as counted
  ConstTensorView offsets;    // [ranks] i32: token_offsets, as laid out
  // out [T·K] i32: a token's place at a rank, at its first pick there that has room; −1 elsewhere
  TensorView places;
  // out [T·K] i32: d·K + k, for the place d of its token at its owner, what the owner's row is
  // told; −1 where there is no slot
  TensorView sources;
};

struct AssignSlots {
  ConstTensorView expert_ids;      // [T, K] i32
  ConstTensorView owners;          // [E] i32
  ConstTensorView expert_offsets;  // [E], and the next three, as laid out
  ConstTensorView rows_before;
  ConstTensorView kept_rows;
  ConstTensorView source_offsets;
  ConstTensorView positions;  // [T·K] i32, as counted; may be the memory of slots unless `sent`
  TensorView slots;           // out [T·K] i32, −1 where there is no room or no pick
  TensorView target_ranks;    // out [T·K] i32, −1 for no pick
  TensorView sources;         // out [T·K] i32, the first Σ own counts of them
  // out [R] i32, where all rows are this rank's own: the assignment of every slot; what names no
  // assignment is left as it is.
  std::optional<TensorView> row_sources = {};
  std::optional<SentTokens> sent = {};
};

// Names rows: entry (i, j) is row slots[i · width + j] of buffer buffers[i · width + j]; a slot
// below 0 names none. Without `buffers` all rows are in the first.
struct RowTable {
  std::int64_t count = 0;
  std::int64_t width = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* buffers = nullptr;
  std::span<std::byte* const> bases;  // host: pointers to contiguous rows
  // Instead of these, pointers in the device's memory, as a meeting gives them: null for buffers
  // whose rows count as not named. They lie on 16 bytes.
  std::byte* const* peer_bases = nullptr;
};

// The rows of this rank's groups that belong to no assignment.
struct PadRows {
  TensorView rows;                         // [R, H], contiguous
  std::optional<TensorView> scalars = {};  // [R] f32
  ConstTensorView row_offsets;             // [e + 1] i32
  ConstTensorView group_rows;              // [e] i32
};

// What goes along with tokens that cross to a rank once, in memory that a meeting has lent.
struct Beside {
  // weights [count · width]: all of token i go to where its row goes, slots[i · width + j] · width.
  const float* weights = nullptr;
  std::byte* const* weight_bases = nullptr;
  // sources [count · width]: each goes to its slot among the rows of the same buffer; none below 0.
  const std::int32_t* sources = nullptr;
  const std::int32_t* source_slots = nullptr;
  std::byte* const* source_bases = nullptr;
};

struct ScatterRows {
  ConstTensorView from;          // [count, H]
  const float* scale = nullptr;  // [count · width] or none
  RowTable to;
  // Scalars that travel along: scalar(i, j) to its slot in f32 buffers, one a base of `to`.
  const float* scalars = nullptr;                 // [count · width] or none
  std::span<std::byte* const> scalar_bases = {};  // host
  std::byte* const* peer_scalar_bases = nullptr;  // instead of these, with `to.peer_bases`
  std::optional<PadRows> pads = {};               // become 0
  std::optional<Beside> beside = {};
};

struct GatherRows {
  RowTable from;
  const float* weights = nullptr;  // [count · width] or none
  TensorView to;                   // [count, H]
  // Scalars that are fetched along: from their slots in f32 buffers, one a base of `from`; 0 where
  // the table names no row.
  std::span<std::byte* const> scalar_bases = {};  // host
  std::byte* const* peer_scalar_bases = nullptr;  // instead of these, with `from.peer_bases`
  // For buffers that have one of these: scalars lie at sources [count · width], not at slots.
  std::byte* const* peer_source_bases = nullptr;
  const std::int32_t* sources = nullptr;
  float* scalars = nullptr;  // out [count · width] or none
};

// The rows of this rank's groups, from the tokens that it has received.
struct FillRows {
  TokenRows tokens;                             // of D tokens
  std::optional<ConstTensorView> weights = {};  // [D, K] f32, contiguous
  ConstTensorView row_offsets;                  // [e + 1] i32
  ConstTensorView group_rows;                   // [e] i32
  TensorView rows;                              // out [R, H], contiguous
  std::optional<TensorView> row_weights = {};   // out [R] f32, with `weights`
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
  const RouterSums* sums = nullptr;  // added to, for a layer's losses and statistics
  TensorView expert_ids;             // out [T, K]
  TensorView routing_weights;        // out [T, K]
  // out [kProblemWords] i64: the first token whose logits are not finite, and where bad ids become
  // none, the first of a replay. The weights of the others are then those without them.
  TensorView problems;
  // [T, K] f32, with in.expert_ids: the routing weights, which become 0 where there is no pick.
  // Then there are no logits: neither x nor weights are read, and sums are of picks alone.
  std::optional<ConstTensorView> given_weights = {};
};

struct RouteTokensBackward {
  const RouterOptions& options;
  const RouterWeights& weights;
  const RouterBackwardInput& in;
  const RouterBackwardOutput& out;
  const RouterSlopes* slopes = nullptr;  // of a layer's losses
};

// An expert takes at most max(1, ceil(tokens · K / E · factor)) of this rank's assignments, for the
// tokens that were counted: for each k by itself, or in all.
struct LimitPicks {
  ConstTensorView expert_ids;  // [T, K] i32
  ConstTensorView weights;     // [T, K] f32
  Capacity capacity;
  const RouterSums& sums;
  TensorView kept_ids;  // out [T, K] i32: −1 for those beyond it
  TensorView dropped;   // out [1] i64: how many
};

// totals [loss_total_words(E)] i64, from the sums of one rank.
struct LossTotals {
  const RouterSums& sums;
  // Of sequences that are cut over ranks: what by_sequence is over all of them. Their losses are
  // made of it; all else is this rank's own.
  std::optional<ConstTensorView> joined = {};  // [S, 2E + 1] i64
  std::int64_t top_k = 0;
  // Ranks that share sequences have the same losses of them: one of them counts.
  bool counts_sequences = true;
  TensorView totals;  // out
};
struct LossSlopes {
  const RouterSums& sums;
  ConstTensorView totals;
  std::int64_t top_k = 0;
  RouterLosses d_losses;
  const RouterSlopes& slopes;  // out: what it has of them
};

// What each expert's output is multiplied by; 1 where it has no picks.
struct OutputScales {
  GradientScale rule = GradientScale::global;
  ConstTensorView picks;   // [E] i64
  ConstTensorView owners;  // [E] i32
  TensorView scales;       // out [E] f32
};
struct ScaleByExpert {
  ConstTensorView expert_ids;  // [T, K] i32
  ConstTensorView scales;      // [E] f32
  ConstTensorView from;        // [T, K] f32
  TensorView to;               // out [T, K] f32: may be `from`; unchanged where there is no pick
};

// Where the time of the experts went, over all threads.
struct WorkTimes {
  std::atomic<std::int64_t> gemm_ns{0};
  std::atomic<std::int64_t> other_ns{0};
};

struct ExpertsForward {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;  // host [e]
  ConstTensorView row_offsets;             // [e + 1] i32
  ConstTensorView group_rows;              // [e] i32
  const ExpertsInput& in;
  const ExpertsOutput& out;
  WorkTimes* times = nullptr;
};

struct ExpertsBackward {
  const ExpertsOptions& options;
  std::span<const ExpertWeights> weights;
  ConstTensorView row_offsets;
  ConstTensorView group_rows;
  const ExpertsBackwardInput& in;
  const ExpertsBackwardOutput& out;
  WorkTimes* times = nullptr;
};

// One expert that every token visits.
struct SharedForward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;                     // [T, H]
  std::optional<TensorView> inner = {};  // out [T, inner_width]: kept for backward
  TensorView y;                          // [T, H]: added to
};
struct SharedBackward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;
  TensorView inner;  // [T, inner_width]; used up
  InnerRows inner_rows = InnerRows::kept;
  ConstTensorView d_y;  // [T, H]
  TensorView d_x;       // [T, H]: added to
  const ExpertGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
};

// Times the stages of a layer by what the device itself says.
class StageTimer {
 public:
  struct Stage {
    std::string_view name;
    double seconds = 0.0;
  };

  virtual ~StageTimer() = default;
  // The stage that began with the last end(), or with the timer, ends here.
  virtual void end(std::string_view stage) = 0;
  // What ends after this is not the layer's any more.
  virtual void stop() = 0;
  // Those of one name together. Waits for the device.
  virtual std::vector<Stage> read() const = 0;
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  virtual void narrow_ids(const NarrowIds& args) const = 0;
  // Counts, positions and distinct tokens in one pass over the ids.
  virtual void count_assignments(const CountAssignments& args) const = 0;
  virtual void lay_out(const LayOut& args) const = 0;
  // The slot of every assignment and its inverse, in (token, k) order.
  virtual void assign_slots(const AssignSlots& args) const = 0;
  // row(i, j) = [scale(i, j) ·] from[i]: a row is read once and written to all its places. Pads
  // become 0 in the same pass.
  virtual void scatter_rows(const ScatterRows& args) const = 0;
  // to[i] = Σ_j [weights(i, j) ·] row(i, j): in f32, j in order, rounded once; 0 for no rows.
  virtual void gather_rows(const GatherRows& args) const = 0;
  // rows[r] = x[row_sources[r] / K] for the rows of groups, row_weights[r] =
  // weights[row_sources[r]]; pads become 0; rows beyond the groups are left alone. What pads name
  // is not read.
  virtual void fill_rows(const FillRows& args) const = 0;
  // dots(i, j) = ⟨with[i], row(i, j)⟩ in f32, in an order that depends on H alone.
  virtual void dot_rows(const DotRows& args) const = 0;

  // Scores, choice and weights of every token. Padding, and tokens whose logits are not finite,
  // have no picks and are in no sum.
  virtual void route_tokens(const RouteTokens& args) const = 0;
  virtual void route_tokens_backward(const RouteTokensBackward& args) const = 0;
  // What is left of the picks. Equal weights: the lower token stays.
  virtual void limit_picks(const LimitPicks& args) const = 0;
  virtual void loss_totals(const LossTotals& args) const = 0;
  virtual void loss_slopes(const LossSlopes& args) const = 0;
  // rows [n, m] i64, which may lie apart: their sum [m].
  virtual void sum_words(const ConstTensorView& rows, const TensorView& sum) const = 0;
  // statistics [E + 1] i64 += picks of every expert, and tokens.
  virtual void count_picks(const RouterSums& sums, const TensorView& statistics) const = 0;
  virtual void output_scales(const OutputScales& args) const = 0;
  virtual void scale_by_expert(const ScaleByExpert& args) const = 0;
  // Rows [T, …] whose valid [T] i32, contiguous, is 0 become 0.
  virtual void zero_padding(const TensorView& rows, const ConstTensorView& valid) const = 0;
  // Where *failed is not 0, every element of these f32 or bf16 views becomes NaN. Rows may lie
  // apart.
  virtual void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const = 0;

  // Whether the two functions that follow take ExpertsInput::tokens for these weights. The answer
  // is the same for any of a layer's experts.
  virtual bool reads_tokens(const ExpertsOptions& /*options*/,
                            std::span<const ExpertWeights> /*weights*/) const {
    return false;
  }
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

  // Ranks meet; the device waits for the others, the host only where it is the device.
  virtual void meet(const Meet& args) const = 0;
  // A heap in this device's memory.
  virtual std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const = 0;
  // Addresses for the heap of a rank in another process, whose pieces are yet to be mapped.
  virtual std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) const = 0;
  // Lets all devices of this kind reach whole pages of the host's memory, as long as the result
  // lives.
  virtual std::shared_ptr<void> share_host_memory(std::span<std::byte> memory) const = 0;
  virtual DeviceIdentity identity() const { return {}; }
  // Why this device cannot reach the memory of another one in another process; empty if it can.
  virtual std::string reason_against_reaching(const DeviceIdentity& /*other*/) const { return {}; }

  virtual Memory memory() const { return Memory::host; }
  // Uninitialised memory, kept for reuse when the last view of it is gone.
  virtual TensorView take(const Shape& shape, Dtype dtype) const = 0;
  virtual void set_zero(const TensorView& view) const = 0;
  // Between views of equal shape and dtype; rows may lie apart. One of them may be in the host's
  // memory: then it waits.
  virtual void copy(const ConstTensorView& from, const TensorView& to) const = 0;
  // Small tables that seldom change, found again by what they hold: [n] i32, valid until thousands
  // of others have been asked for, and in a captured step for as long as the device lives.
  virtual ConstTensorView constant(std::span<const std::int32_t> values) const = 0;
  // A few numbers of the host into a contiguous view; does not wait, and `from` is free at once.
  virtual void upload(std::span<const std::byte> from, const TensorView& to) const = 0;
  // A contiguous view to the host; waits, and counts in host_syncs().
  virtual void fetch(const ConstTensorView& from, std::span<std::byte> to) const = 0;
  virtual std::int64_t bytes_held() const = 0;
  virtual int num_threads() const = 0;

  virtual Stream stream() const { return {}; }
  virtual void set_stream(Stream /*stream*/) const {}
  // Until all work given to the device is done.
  virtual void synchronize() const {}
  virtual std::int64_t host_syncs() const { return 0; }
  // The timer of the stages that begin now; null where the host's clock is right, and where a GPU
  // is not to time them (memory() tells which).
  virtual std::shared_ptr<StageTimer> time_stages() const { return nullptr; }
  virtual int ordinal() const { return 0; }  // which GPU
};

inline const DeviceBackend& backend_of(const Device& device) { return *device.backend_; }

}  // namespace switchyard
