// The plan: where every assignment of a token to an expert goes. Integers only.
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

enum class DuplicateIds { reject, allow };

// Ids of num_experts and more.
enum class SentinelIds {
  reject,
  allow,  // they are no pick, as −1 is: Transformers marks the picks of other ranks so
};

struct PlanOptions {
  std::int64_t hidden = 0;     // H: elements of a row
  Dtype dtype = Dtype::f32;    // of rows: f32 or bf16
  std::int64_t alignment = 1;  // each expert's group starts at a multiple of it
  Sizing sizing = {};
  DuplicateIds duplicate_ids = DuplicateIds::reject;
  SentinelIds sentinel_ids = SentinelIds::reject;
};

// What went wrong in a bounded plan, the same on every rank. An exact plan throws instead.
struct PlanStatus {
  bool overflow = false;  // some rank needs more than available_rows or available_tokens
  bool bad_ids = false;   // some rank gave ids out of range or twice in a token; they count as −1
  std::string bad_ids_message;
  bool non_finite = false;  // some rank's router met logits that are not finite
  std::string non_finite_message;
  std::int64_t available_rows = 0;        // rows a rank has; 0 for an exact plan
  std::vector<std::int64_t> needed_rows;  // [ranks] aligned rows that the routing asks for
  std::vector<std::int64_t> dropped;      // [ranks] assignments dropped at each owner
  // Where tokens cross to a rank once (MoverKind::peer); otherwise 0.
  std::int64_t available_tokens = 0;        // that a rank has room for; 0 for an exact plan
  std::vector<std::int64_t> needed_tokens;  // [ranks] that a rank receives
};

// Made by a Planner, then only read; copies share their memory. Its tables are in the memory of the
// planner's device.
//
// On a GPU, a bounded plan is not known to the host: functions marked (waits) fetch what they say
// at every call, since a graph may have planned anew. All other plans are known once they are made.
//
// slot = row_offsets[expert] + Σ_{s < rank} counts[s][expert]
//        + this rank's earlier assignments to that expert, in (token, k) order
// where row_offsets is the exclusive prefix sum, over the owner's experts in ascending order, of
// the counts rounded up to the alignment. So the slot is a function of the routing alone.
class SWITCHYARD_API Plan {
 public:
  Plan(const Plan&) = default;  // and no move, which would leave a plan of nothing behind
  Plan& operator=(const Plan&) = default;

  std::int64_t num_tokens() const;  // T of this rank
  std::int64_t top_k() const;       // K
  std::int64_t alignment() const;
  const PlanOptions& options() const;
  const ExpertPlacement& placement() const;
  int rank() const;

  // Rows that this rank's experts use, padding included. (waits)
  std::int64_t num_rows() const;
  // Rows that this rank's buffers must have: num_rows(), or the capacity of a bounded plan.
  std::int64_t row_capacity() const;
  // [local experts + 1] i32: where the group of each of this rank's experts begins.
  ConstTensorView row_offsets() const;
  // [local experts] i32: rows of each group before padding.
  ConstTensorView group_rows() const;

  // [T, K] i32: the slot of each assignment at its owner; −1 where there is none, or no room.
  ConstTensorView slots() const;
  // [T, K] i32: the owner of each assignment; −1 where there is none.
  ConstTensorView target_ranks() const;
  // [n] i32: this rank's assignments, as t·K + k, by expert and then in (token, k) order: the
  // inverse of slots. Those of expert e are source_offsets()[e] … source_offsets()[e + 1] − 1.
  // (waits)
  ConstTensorView sources() const;
  // [num_experts + 1] i32.
  ConstTensorView source_offsets() const;
  // [row_capacity] i32: the assignment t·K + k of every row of a group; of other rows anything.
  // Only at one rank, where all rows are this rank's own; otherwise it throws.
  ConstTensorView row_sources() const;

  // [num_experts] i32: assignments that a rank makes to each expert, before anything is dropped.
  // Memory of the plan, which the next function that waits overwrites. (waits)
  std::span<const std::int32_t> counts(int rank) const;
  // Tokens of rank `source` that have at least one assignment at rank `target`. (waits)
  std::int64_t distinct_tokens(int source, int target) const;

  PlanStatus status() const;  // (waits)
  // Throws InvalidArgument, the same on every rank, if the status reports bad ids, logits that are
  // not finite, or an overflow that is not to be dropped. (waits)
  void check() const;

 private:
  // For the library's own parts.
  friend Plan plan_of(std::shared_ptr<const PlanData> data);
  friend const PlanData& data_of(const Plan& plan);
  explicit Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

  std::shared_ptr<const PlanData> data_;
};

// Makes plans for one layer. Every rank makes its planner with the same options, in the same order
// among the objects over this communicator; the constructor and plan() are collective.
class SWITCHYARD_API Planner {
 public:
  Planner(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
          Device device = {});
  ~Planner();
  Planner(Planner&&) noexcept;

  // expert_ids [T, K] i32 or i64 in the device's memory, −1 = no pick; T may differ between ranks
  // and be 0. Bad ids on one rank are the same InvalidArgument on all, or a status of a bounded
  // plan; and so is a token that the router could not route (Routing::first_non_finite_token).
  Plan plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token = -1);
  // The same, from a router's result: its ids and problems stay in the device's memory.
  Plan plan(const Routing& routing);

  // The sizing of the plans that follow; every rank gives the same.
  void resize(const Sizing& sizing);

 private:
  std::unique_ptr<PlanMaker> maker_;
};

}  // namespace switchyard
