// SPDX-License-Identifier: Apache-2.0
// The plan: the destination of every assignment of a token to an expert. It consists of integers
// only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/placement.h"
#include "switchyard/sizing.h"
#include "switchyard/tensor.h"

namespace switchyard {

class PlanMaker;
struct PlanData;
struct Routing;

// Says how to treat a token that picks an expert more than once.
enum class DuplicateIds { reject, allow };

// Says how to treat ids of num_experts or more.
enum class SentinelIds {
  reject,
  allow,  // they mean no pick, like −1; Transformers marks the picks of other ranks this way
};

// Options of a Planner.
struct PlanOptions {
  std::int64_t hidden = 0;     // H: elements of a row
  Dtype dtype = Dtype::f32;    // dtype of rows: f32 or bf16
  std::int64_t alignment = 1;  // every expert's group begins at a multiple of it
  Sizing sizing = {};
  DuplicateIds duplicate_ids = DuplicateIds::reject;
  SentinelIds sentinel_ids = SentinelIds::reject;
};

// Problems found in a bounded plan, the same on every rank. An exact plan throws for bad ids and
// non-finite logits instead.
struct PlanStatus {
  bool overflow = false;  // some rank needs more than available_rows or available_tokens
  // Some rank gave ids that are out of range or repeated within a token; they count as −1.
  bool bad_ids = false;
  std::string bad_ids_message;
  bool non_finite = false;  // the router of some rank computed non-finite logits
  std::string non_finite_message;
  std::int64_t available_rows = 0;        // capacity of each rank; 0 for an exact plan
  std::vector<std::int64_t> needed_rows;  // [ranks] rows that the routing needs, with padding
  std::vector<std::int64_t> dropped;      // [ranks] assignments dropped at each owner
  // Token counts, where a token goes to a rank once (MoverKind::peer); otherwise 0.
  std::int64_t available_tokens = 0;        // capacity of each rank; 0 for an exact plan
  std::vector<std::int64_t> needed_tokens;  // [ranks] tokens that each rank receives
};

// Where the rows of every expert lie, and the slot of every assignment. Made by a Planner and
// immutable; copies share their memory. The tables are in the memory of the planner's device.
//
// On a GPU, the host does not know the contents of a bounded plan. Functions marked (waits) fetch
// them on every call, because a replayed graph may have made the plan anew. All other plans are
// known to the host once they are made.
//
// slot = row_offsets[expert] + Σ_{s < rank} counts[s][expert]
//        + this rank's earlier assignments to that expert, in (token, k) order
// where row_offsets is the exclusive prefix sum, over the owner's experts in ascending order, of
// the counts rounded up to the alignment. The slot is therefore a function of the routing alone.
class SWITCHYARD_API Plan {
 public:
  // Copied even when moved, because a move would leave an empty plan behind.
  Plan(const Plan&) = default;
  Plan& operator=(const Plan&) = default;

  std::int64_t num_tokens() const;  // T of this rank
  std::int64_t top_k() const;       // K
  std::int64_t alignment() const;
  const PlanOptions& options() const;
  const ExpertPlacement& placement() const;
  int rank() const;

  // The number of rows that this rank's experts use, padding included. (waits)
  std::int64_t num_rows() const;
  // The number of rows that this rank's buffers must have: num_rows(), or the capacity of a bounded
  // plan.
  std::int64_t row_capacity() const;
  // The row offsets of this rank's groups, [local experts + 1] i32: the first row of each group,
  // and the end of the last.
  ConstTensorView row_offsets() const;
  // The number of rows in each group, without padding, [local experts] i32.
  ConstTensorView group_rows() const;

  // The slot of each assignment at its owner, [T, K] i32; −1 if there is no pick, or no room.
  ConstTensorView slots() const;
  // The owner of each assignment, [T, K] i32; −1 if there is no pick.
  ConstTensorView target_ranks() const;
  // This rank's assignments as t·K + k, [n] i32, ordered by expert and then by (token, k). This is
  // the inverse of slots. Those to expert e begin at source_offsets()[e] and end before
  // source_offsets()[e + 1]. (waits)
  ConstTensorView sources() const;
  // The first entry of each expert in sources(), [num_experts + 1] i32.
  ConstTensorView source_offsets() const;
  // The assignment t·K + k of every row, [row_capacity] i32; undefined for rows that belong to no
  // assignment. Throws Unsupported with several ranks, because rows then also come from other
  // ranks.
  ConstTensorView row_sources() const;

  // The assignments that a rank makes to each expert, [num_experts] i32, before any are dropped.
  // The memory belongs to the plan and is overwritten by the next function that waits. (waits)
  std::span<const std::int32_t> counts(int rank) const;
  // The number of tokens of rank `source` that have at least one assignment at rank `target`.
  // (waits)
  std::int64_t distinct_tokens(int source, int target) const;

  // The problems found. (waits)
  PlanStatus status() const;
  // Throws InvalidArgument, the same on every rank, if the status reports bad ids, non-finite
  // logits, or an overflow with Overflow::fail. (waits)
  void check() const;

 private:
  // For internal use.
  friend Plan plan_of(std::shared_ptr<const PlanData> data);
  friend const PlanData& data_of(const Plan& plan);
  explicit Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

  std::shared_ptr<const PlanData> data_;
};

// Makes the plans of one layer. The constructor and plan() are collective. Every rank makes its
// planner with the same options, and in the same order relative to other objects over this
// communicator; the communicator must outlive it.
class SWITCHYARD_API Planner {
 public:
  Planner(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
          Device device = {});
  ~Planner();
  Planner(Planner&&) noexcept;

  // Makes a plan for expert_ids [T, K] i32 or i64 in the device's memory, where −1 means no pick. T
  // may differ between ranks and be 0; K is 1 to 1024 and equal on all ranks. Bad ids on one rank
  // throw the same InvalidArgument on every rank, and so does a token that the router could not
  // route (Routing::first_non_finite_token). A bounded plan reports both in its status instead.
  Plan plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token = -1);
  // Makes a plan from a router's result. Its ids and problems stay in the device's memory.
  Plan plan(const Routing& routing);

  // Sets the sizing of subsequent plans. Every rank must give the same. Not collective.
  void resize(const Sizing& sizing);

 private:
  std::unique_ptr<PlanMaker> maker_;
};

}  // namespace switchyard
