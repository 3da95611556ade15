// SPDX-License-Identifier: Apache-2.0
// Makes the plans of Planner, Dispatcher and MoeLayer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "moe/plan/plan_data.h"
#include "peer/peer_memory.h"
#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"
#include "switchyard/plan.h"
#include "switchyard/router.h"

namespace switchyard {

// The problems that a router found, and where plans report theirs. The words of both are in the
// memory of the planner's device, so that a plan does not have to wait for them.
struct PlanProblems {
  RouterProblems of_router;
  // [kStepWords] i64, contiguous, initially zero: the combined report of all plans of a step. Not
  // written if the hosts exchange records, since status() then has everything.
  std::optional<TensorView> step = {};
};

// The input of assign_slots besides the layout of the groups: [T, K] i32, as count_assignments
// writes it.
struct Counted {
  TensorView positions = {};
  std::optional<TensorView> token_positions = {};  // only if tokens cross once
};

// How ranks exchange their counts.
enum class Exchange {
  host,  // through the communicator: CPUs, and single ranks
  peer_memory,
};

// Returns the first of the ids that mean no pick (NarrowIds::first_sentinel), if there are any.
std::optional<std::int64_t> first_sentinel(std::int64_t num_experts, SentinelIds sentinels);
// Converts ids [T, K], i32 or i64 in device memory, to the form that kernels read: i32, with −1 for
// sentinels if these are allowed. Returns the same view if nothing has to change. Does not wait.
ConstTensorView narrowed_ids(const Device& device, const ConstTensorView& expert_ids,
                             std::int64_t num_experts, SentinelIds sentinels);

// Which tables a plan has.
enum class PlanTables {
  own,            // tables that one device can fill by itself
  of_all_ranks,   // also the records that ranks exchange in peer memory
  crossing_once,  // also the places of tokens that cross to a rank once
};
// Takes the tables of `data`, whose placement, rank, num_tokens and top_k are already set.
void take_tables(PlanData& data, PlanTables kind, const TakeTable& take);
// Return the number of i32 words of a plan in a tensor: without the tables that have one entry per
// pick, and in total. The first takes the tables once to count their words.
std::int64_t words_without_picks(const ExpertPlacement& placement, int rank);
std::int64_t words_of_plan(std::int64_t without_picks, std::int64_t num_tokens, std::int64_t top_k);

class PlanMaker {
 public:
  PlanMaker(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
            Device device, Exchange exchange = Exchange::host);

  // Collective.
  std::shared_ptr<PlanData> plan(const ConstTensorView& expert_ids, const PlanProblems& problems) {
    return plan(expert_ids, problems, memory_of(backend_of(device_)), Fetch::what_is_needed);
  }
  // Collective. Makes the plan in the caller's tensor, which is all that plan_in and complete need.
  // Does not wait.
  void plan_into(const ConstTensorView& expert_ids, const PlanProblems& problems,
                 const TensorView& memory);
  // Returns the plan that a tensor holds. Not collective.
  std::shared_ptr<PlanData> plan_in(const TensorView& memory, const PlanForm& form) const;
  // Completes the form of an exact plan, or throws its error, the same on every rank. Not
  // collective. (waits)
  PlanForm complete(const TensorView& memory, const PlanForm& form) const;
  static PlanProblems problems_of(std::int64_t first_non_finite_token) {
    return {.of_router = {.first_non_finite_token = first_non_finite_token}};
  }
  // Checks the problem words, since the routing comes from a caller.
  PlanProblems problems_of(const Routing& routing) const;

  void resize(const Sizing& sizing);
  Communicator& comm() const { return comm_; }
  const ExpertPlacement& placement() const { return *placement_; }
  // Null unless ranks exchange records in peer memory.
  const std::shared_ptr<PeerMeetings>& meetings() const { return meetings_; }

 private:
  // How much of a new plan the host fetches.
  enum class Fetch { what_is_needed, nothing };

  std::shared_ptr<PlanData> plan(const ConstTensorView& expert_ids, const PlanProblems& problems,
                                 const TakeTable& take, Fetch fetch);
  RecordHeader header_of(const ConstTensorView& expert_ids) const;
  PlanTables tables() const;
  void require_words(const TensorView& memory, std::int64_t num_tokens, std::int64_t top_k) const;
  bool crosses_once() const;
  // The arguments of count_assignments, without the ids.
  CountAssignments counting(const Counted& counted, const PlanData& data) const;
  LayOut layout_alone(const PlanProblems& problems, const PlanData& data) const;
  Counted count(const ConstTensorView& expert_ids, const PlanProblems& problems,
                PlanData& data) const;
  void plan_at_once(const ConstTensorView& expert_ids, const RecordHeader& header,
                    const PlanProblems& problems, PlanData& data);
  void plan_alone(const RecordHeader& header, const PlanProblems& problems, PlanData& data);
  void learn_alone(PlanData& data);
  void plan_together(RecordHeader header, PlanData& data);
  void plan_in_peer_memory(const RecordHeader& header, const PlanProblems& problems, PlanData& data,
                           Fetch fetch);
  void require_possible(const PlanData& data) const;

  Communicator& comm_;
  std::shared_ptr<const ExpertPlacement> placement_;
  PlanOptions options_;
  Device device_;
  Device host_;  // provides memory for what is fetched from a GPU
  PlacementTables device_tables_;
  std::shared_ptr<PeerMeetings> meetings_;
  std::int64_t words_without_picks_ = 0;  // set only if ranks exchange records in peer memory
  std::int64_t id_;
  std::int64_t num_plans_ = 0;
};

}  // namespace switchyard
