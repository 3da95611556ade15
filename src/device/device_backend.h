// SPDX-License-Identifier: Apache-2.0
// The contract of a device: one function per kernel, with the same meaning on every device.
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

// Views and pointers refer to the device's own memory unless a comment says host. Sizes that depend
// on the routing are in that memory too, and no function waits for them.

// Converts the caller's expert ids to the i32 ids that the other functions read.
struct NarrowIds {
  ConstTensorView from;  // [T, K] i32 or i64; rows may be strided
  // Ids at or above this become −1; if it is not set, they stay. Ids outside the range of i32 are
  // clamped to it, and neither limit is the id of an expert.
  std::optional<std::int64_t> first_sentinel = {};
  TensorView to;  // out [T, K] i32, contiguous
};

struct CountAssignments {
  ConstTensorView expert_ids = {};  // [T, K] i32
  ConstTensorView owners;           // [E] i32
  bool allow_duplicates = false;
  TensorView counts;           // out [E] i32
  TensorView distinct_tokens;  // out [ranks] i32
  // out [T·K] i32: the number of this rank's earlier assignments to the same expert; −1 for no pick
  // and for bad ids
  TensorView positions;
  // out [T·K] i32: the number of this rank's earlier tokens that have a pick at the same owner; −1
  // as in positions
  std::optional<TensorView> token_positions = {};
  // [kProblemWords] i64. in: the problems that the router found; out: also the first bad id, unless
  // the router already found one.
  TensorView problems;
};

// Lays out the groups of all experts at their owners, and finds how many rows of each fit.
struct LayOut {
  ConstTensorView counts;           // [ranks, E] i32 by source rank; rows may be strided
  ConstTensorView owners;           // [E] i32
  ConstTensorView experts_by_rank;  // [E] i32: the experts of rank 0, then those of rank 1, …
  ConstTensorView rank_offsets;     // [ranks + 1] i32: where each rank's experts begin
  int rank = 0;
  std::int64_t alignment = 1;
  Sizing sizing = {};
  TensorView expert_offsets;  // out [E] i32: where each expert's group begins
  TensorView rows_before;     // out [E] i32: rows from lower ranks, at most kept_rows
  TensorView kept_rows;       // out [E] i32: how many rows of each expert fit
  TensorView row_offsets;     // out [local + 1] i32: where this rank's groups begin, and their end
  TensorView group_rows;      // out [local] i32
  TensorView source_offsets;  // out [E + 1] i32: exclusive prefix sum of this rank's counts
  TensorView layout;          // out [layout_words(ranks)] i64
  // [ranks, ranks] i32 by source and target, for plans where a token crosses to a rank once; rows
  // may be strided. A rank without room for its tokens keeps no rows at all.
  std::optional<ConstTensorView> distinct_tokens = {};
  // out [ranks] i32: where this rank's tokens begin among those that each rank receives
  std::optional<TensorView> token_offsets = {};
  // [ranks, n] i64: words that must be equal on all ranks; rows may be strided. If they differ, all
  // counts are taken as 0 and the plan has no rows.
  std::optional<ConstTensorView> must_agree = {};
  // The problems of all ranks and the layout's sizes are accumulated into the words of the step.
  std::optional<ConstTensorView> problems = {};  // [ranks, kProblemWords] i64; rows may be strided
  std::optional<TensorView> step = {};           // [kStepWords] i64
};

// The tokens that this rank sends, for plans where a token crosses to a rank once. A token's place
// at a rank is its index among all tokens that the rank receives.
struct SentTokens {
  ConstTensorView positions;  // [T·K] i32: CountAssignments::token_positions
  ConstTensorView offsets;    // [ranks] i32: LayOut::token_offsets
  // out [T·K] i32: the token's place at the pick's owner, given only for its first pick there that
  // has room; −1 elsewhere
  TensorView places;
  // out [T·K] i32: d·K + k, where d is the token's place at the owner. The owner's row gets it as
  // its source. −1 where there is no slot.
  TensorView sources;
};

struct AssignSlots {
  ConstTensorView expert_ids = {};  // [T, K] i32
  ConstTensorView owners;           // [E] i32
  ConstTensorView expert_offsets;   // this and the next three: as in LayOut
  ConstTensorView rows_before;
  ConstTensorView kept_rows;
  ConstTensorView source_offsets;
  // [T·K] i32: CountAssignments::positions; may share the memory of `slots` unless `sent` is set
  ConstTensorView positions;
  TensorView slots;         // out [T·K] i32; −1 where there is no room or no pick
  TensorView target_ranks;  // out [T·K] i32; −1 for no pick
  // out [T·K] i32: this rank's assignments ordered by expert; only the first Σ own counts are set
  TensorView sources;
  // out [R] i32, if all rows are this rank's own: the assignment of every slot. Slots without an
  // assignment are left unchanged.
  std::optional<TensorView> row_sources = {};
  std::optional<SentTokens> sent = {};
};

// The problems that a router found: its words [kProblemWords] i64, or, if they are not given, at
// most a token whose logits are not finite (−1 for none).
struct RouterProblems {
  std::optional<ConstTensorView> words = {};
  std::int64_t first_non_finite_token = -1;
};

// The whole plan of a rank that is alone: narrow_ids, count_assignments, lay_out and assign_slots.
struct PlanAlone {
  ConstTensorView expert_ids;                       // [T, K] i32 or i64; rows may be strided
  std::optional<std::int64_t> first_sentinel = {};  // as in NarrowIds
  RouterProblems problems = {};
  // The arguments of the steps. `expert_ids` of `count` and `slots` are left out: they are the
  // narrowed ids. `count.problems` is only written; `count.positions` is scratch memory. The counts
  // of `layout` are those of `count`. There are no token_positions, and nothing is `sent`.
  CountAssignments count;
  LayOut layout;
  AssignSlots slots;
};

// A table of rows: entry (i, j) is row slots[i · width + j] of buffer buffers[i · width + j]. A
// negative slot names no row. Without `buffers`, all rows are in the first buffer.
struct RowTable {
  std::int64_t count = 0;
  std::int64_t width = 0;
  const std::int32_t* slots = nullptr;
  const std::int32_t* buffers = nullptr;
  std::span<std::byte* const> bases;  // host: pointers to contiguous rows
  // Used instead of `bases`: a table of pointers in the device's memory, as a meeting returns it.
  // Rows of a null buffer count as not named. The pointers are aligned to 16 bytes.
  std::byte* const* peer_bases = nullptr;
};

// The padding rows of this rank's groups, which belong to no assignment.
struct PadRows {
  TensorView rows;                         // [R, H], contiguous
  std::optional<TensorView> scalars = {};  // [R] f32
  ConstTensorView row_offsets;             // [e + 1] i32
  ConstTensorView group_rows;              // [e] i32
};

// Data sent along with tokens that cross to a rank once, into memory lent at a meeting.
struct Beside {
  // weights [count · width]: all `width` weights of token i are copied to wherever its row goes, at
  // element slots[i · width + j] · width.
  const float* weights = nullptr;
  std::byte* const* weight_bases = nullptr;
  // sources [count · width]: each is written at its source_slots entry in the same buffer's table.
  // Negative sources are skipped.
  const std::int32_t* sources = nullptr;
  const std::int32_t* source_slots = nullptr;
  std::byte* const* source_bases = nullptr;
};

struct ScatterRows {
  ConstTensorView from;          // [count, H]
  const float* scale = nullptr;  // [count · width] or null
  RowTable to;
  // Scalars sent with the rows: scalar (i, j) goes to its slot in an f32 buffer, of which there is
  // one for each base of `to`.
  const float* scalars = nullptr;                 // [count · width] or null
  std::span<std::byte* const> scalar_bases = {};  // host
  std::byte* const* peer_scalar_bases = nullptr;  // replaces scalar_bases if `to` has peer_bases
  std::optional<PadRows> pads = {};               // set to 0
  std::optional<Beside> beside = {};
};

struct GatherRows {
  RowTable from;
  const float* weights = nullptr;  // [count · width] or null
  TensorView to;                   // [count, H]
  // Scalars read with the rows: each from its slot in an f32 buffer, of which there is one for each
  // base of `from`; 0 where the table names no row.
  std::span<std::byte* const> scalar_bases = {};  // host
  std::byte* const* peer_scalar_bases = nullptr;  // replaces scalar_bases if `from` has peer_bases
  // Where this is not null for a buffer, its scalars are here, indexed by sources [count · width]
  // instead of slots.
  std::byte* const* peer_source_bases = nullptr;
  const std::int32_t* sources = nullptr;
  float* scalars = nullptr;  // out [count · width] or null
};

// Fills the rows of this rank's groups from the tokens that it has received.
struct FillRows {
  TokenRows tokens;                             // D tokens
  std::optional<ConstTensorView> weights = {};  // [D, K] f32, contiguous
  ConstTensorView row_offsets;                  // [e + 1] i32
  ConstTensorView group_rows;                   // [e] i32
  TensorView rows;                              // out [R, H], contiguous
  std::optional<TensorView> row_weights = {};   // out [R] f32; needs `weights`
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
  // out [kProblemWords] i64: the first token whose logits are not finite and, if bad ids become
  // none, the first bad id of a replay. The other picks are weighed as if bad ids were not there.
  TensorView problems;
  // [T, K] f32, with in.expert_ids: the routing weights to use, with 0 where there is no pick.
  // There are no logits then: x and `weights` are not read, and `sums` gets only picks and tokens.
  std::optional<ConstTensorView> given_weights = {};
};

struct RouteTokensBackward {
  const RouterOptions& options;
  const RouterWeights& weights;
  const RouterBackwardInput& in;
  const RouterBackwardOutput& out;
  const RouterSlopes* slopes = nullptr;  // gradients of a layer's losses
};

// Limits each expert to max(1, ceil(tokens · K / E · factor)) of this rank's assignments, where
// `tokens` is the number of tokens in `sums`. The rule applies it to each k separately or in total.
struct LimitPicks {
  ConstTensorView expert_ids;  // [T, K] i32
  ConstTensorView weights;     // [T, K] f32
  Capacity capacity;
  const RouterSums& sums;
  TensorView kept_ids;  // out [T, K] i32: −1 for picks beyond the limit
  TensorView dropped;   // out [1] i64: the number of such picks
};

// Computes totals [loss_total_words(E)] i64 from the sums of one rank.
struct LossTotals {
  const RouterSums& sums;
  // For sequences that are cut over ranks: by_sequence, summed over these ranks. The sequences'
  // losses come from it; everything else is this rank's own.
  std::optional<ConstTensorView> joined = {};  // [S, 2E + 1] i64
  std::int64_t top_k = 0;
  // Ranks that share sequences compute the same losses for them, so only one of them counts these.
  bool counts_sequences = true;
  TensorView totals;  // out
};
struct LossSlopes {
  const RouterSums& sums;
  ConstTensorView totals;
  std::int64_t top_k = 0;
  RouterLosses d_losses;
  const RouterSlopes& slopes;  // out: the slopes that it has
};

// Computes the factor for each expert's output; 1 for an expert without picks.
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
  TensorView to;               // out [T, K] f32; may be `from`. Unscaled where there is no pick
};

// The time spent in experts, summed over all threads.
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

// Runs one expert over every token.
struct SharedForward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;                     // [T, H]
  std::optional<TensorView> inner = {};  // out [T, inner_width]: kept for backward
  TensorView y;                          // [T, H]: the result is added to it
};
struct SharedBackward {
  const ExpertsOptions& options;
  const ExpertWeights& weights;
  ConstTensorView x;
  TensorView inner;  // [T, inner_width]; overwritten
  InnerRows inner_rows = InnerRows::kept;
  ConstTensorView d_y;  // [T, H]
  TensorView d_x;       // [T, H]: the result is added to it
  const ExpertGradients& gradients;
  GradientMode mode = GradientMode::overwrite;
};

// Times the stages of a layer by the device's own clock.
class StageTimer {
 public:
  struct Stage {
    std::string_view name;
    double seconds = 0.0;
  };

  virtual ~StageTimer() = default;
  // Ends the stage that began at the previous end(), or when the timer was created.
  virtual void end(std::string_view stage) = 0;
  // Ignores later calls of end(), whose work no longer belongs to the layer.
  virtual void stop() = 0;
  // Returns the stages; those with the same name are added up. Waits for the device.
  virtual std::vector<Stage> read() const = 0;
};

class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;

  virtual void narrow_ids(const NarrowIds& args) const = 0;
  // Computes counts, positions and distinct tokens in one pass over the ids.
  virtual void count_assignments(const CountAssignments& args) const = 0;
  virtual void lay_out(const LayOut& args) const = 0;
  // Computes the slot of every assignment and the inverse map, in (token, k) order.
  virtual void assign_slots(const AssignSlots& args) const = 0;
  // Takes one step after the other, unless the device can make the plan at once.
  virtual void plan_alone(const PlanAlone& args) const;
  // Sets the words [kProblemWords] i64 that count_assignments adds to.
  void set_problems(const RouterProblems& problems, const TensorView& words) const;
  // row(i, j) = [scale(i, j) ·] from[i]. Reads each row once and writes it to all its places.
  // Zeroes the padding in the same pass.
  virtual void scatter_rows(const ScatterRows& args) const = 0;
  // to[i] = Σ_j [weights(i, j) ·] row(i, j), added in f32 in the order of j and rounded once; 0 if
  // there are no rows.
  virtual void gather_rows(const GatherRows& args) const = 0;
  // rows[r] = x[row_sources[r] / K] and row_weights[r] = weights[row_sources[r]] for the rows of
  // groups. Zeroes the padding, whose sources are not read. Leaves rows beyond the groups as is.
  virtual void fill_rows(const FillRows& args) const = 0;
  // dots(i, j) = ⟨with[i], row(i, j)⟩ in f32, added in an order that depends only on H.
  virtual void dot_rows(const DotRows& args) const = 0;

  // Computes the scores, picks and weights of every token. Padding and tokens whose logits are not
  // finite get no picks and are not counted in any sum.
  virtual void route_tokens(const RouteTokens& args) const = 0;
  virtual void route_tokens_backward(const RouteTokensBackward& args) const = 0;
  // Drops the picks beyond the capacity. Of equal weights, the lower token keeps its pick.
  virtual void limit_picks(const LimitPicks& args) const = 0;
  virtual void loss_totals(const LossTotals& args) const = 0;
  virtual void loss_slopes(const LossSlopes& args) const = 0;
  // sum [m] = the sum of rows [n, m] i64, which may be strided.
  virtual void sum_words(const ConstTensorView& rows, const TensorView& sum) const = 0;
  // statistics [E + 1] i64 += the picks of every expert, then the number of tokens.
  virtual void count_picks(const RouterSums& sums, const TensorView& statistics) const = 0;
  virtual void output_scales(const OutputScales& args) const = 0;
  virtual void scale_by_expert(const ScaleByExpert& args) const = 0;
  // Zeroes the rows [T, …] for which valid [T] i32 (contiguous) is 0.
  virtual void zero_padding(const TensorView& rows, const ConstTensorView& valid) const = 0;
  // Fills these f32 or bf16 views with NaN if *failed is not 0. Rows may be strided.
  virtual void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const = 0;

  // True if experts_forward and experts_backward accept `tokens` in their input.
  virtual bool reads_tokens(const ExpertsOptions& /*options*/) const { return false; }
  // Runs every group through its expert. The bits depend only on the group's rows and the sizes of
  // the matrices.
  virtual void experts_forward(const ExpertsForward& args) const = 0;
  virtual void experts_backward(const ExpertsBackward& args) const = 0;
  // Runs every token through one expert. A token's bits depend on nothing but the token.
  virtual void shared_forward(const SharedForward& args) const = 0;
  virtual void shared_backward(const SharedBackward& args) const = 0;

  // Computes products whose arguments have been checked, in any order. The bits depend only on a
  // product's sizes, strides and dtypes.
  virtual void multiply(std::span<const Matmul> products) const = 0;
  // Cuts 0 … count − 1 into parts and calls piece(first, last) for each, on all threads.
  virtual void split(std::int64_t count,
                     const std::function<void(std::int64_t, std::int64_t)>& piece) const = 0;

  // Meets the other ranks. The device waits for them; the host does so only if it is the device.
  virtual void meet(const Meet& args) const = 0;
  // Creates a heap in this device's memory.
  virtual std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const = 0;
  // Reserves addresses for the heap of a rank in another process. Its pieces are mapped later.
  virtual std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) const = 0;
  // Makes whole pages of host memory accessible to all devices of this kind for as long as the
  // result lives.
  virtual std::shared_ptr<void> share_host_memory(std::span<std::byte> memory) const = 0;
  virtual DeviceIdentity identity() const { return {}; }
  // Returns why this device cannot reach the memory of a device in another process, or an empty
  // string if it can.
  virtual std::string reason_against_reaching(const DeviceIdentity& /*other*/) const { return {}; }

  virtual Memory memory() const { return Memory::host; }
  // Returns uninitialised memory. It is kept for reuse once its last view is gone.
  virtual TensorView take(const Shape& shape, Dtype dtype) const = 0;
  virtual void set_zero(const TensorView& view) const = 0;
  // Copies between views of equal shape and dtype; rows may be strided. One of them may be in host
  // memory, and then the call waits.
  virtual void copy(const ConstTensorView& from, const TensorView& to) const = 0;
  // Returns a small table [n] i32 with these values, cached by contents. It is valid until
  // thousands of other tables have been requested or, if a captured step uses it, as long as the
  // device lives.
  virtual ConstTensorView constant(std::span<const std::int32_t> values) const = 0;
  // Copies a few numbers from the host to a contiguous view. Does not wait, and `from` may be
  // reused at once.
  virtual void upload(std::span<const std::byte> from, const TensorView& to) const = 0;
  // Copies a contiguous view to the host. Waits, and counts in host_syncs().
  virtual void fetch(const ConstTensorView& from, std::span<std::byte> to) const = 0;
  virtual std::int64_t bytes_held() const = 0;
  virtual int num_threads() const = 0;

  virtual Stream stream() const { return {}; }
  virtual void set_stream(Stream /*stream*/) const {}
  // Waits until all work given to the device is done.
  virtual void synchronize() const {}
  virtual std::int64_t host_syncs() const { return 0; }
  // Starts a timer for the stages that follow. Returns null if the host's clock suffices or if the
  // GPU is not set to time stages; memory() tells which.
  virtual std::shared_ptr<StageTimer> time_stages() const { return nullptr; }
  virtual int ordinal() const { return 0; }  // which GPU
};

inline const DeviceBackend& backend_of(const Device& device) { return *device.backend_; }

}  // namespace switchyard
