// Makes plans, for those whose arguments are checked: Planner, Dispatcher and MoeLayer.
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

// What a router met, and where plans report, in the memory of the planner's device: a plan that is
// given these waits for nothing that need not be waited for.
struct PlanProblems {
  ConstTensorView words;  // [kProblemWords] i64, contiguous, as the device's router writes them
  // [kStepWords] i64, contiguous: what the plans of a step report together, zeros to begin with.
  // Left as it is where the host exchanges records: status() says it all.
  std::optional<TensorView> step = {};
};

// What slots are found from, besides where groups lie: [T, K] i32 as count_assignments gives them.
struct Counted {
  TensorView positions = {};
  std::optional<TensorView> token_positions = {};  // where tokens cross once
};

// How ranks tell each other what they have counted.
enum class Exchange {
  host,  // by the communicator: CPUs, and ranks that are alone
  peer_memory,
};

// Ids [T, K] i32 or i64 in the device's memory as its kernels read them: i32, with −1 for
// sentinels. The same view where nothing has to change; does not wait.
ConstTensorView narrowed_ids(const Device& device, const ConstTensorView& expert_ids,
                             std::int64_t num_experts, SentinelIds sentinels);

// Which tables a plan has.
enum class PlanTables {
  own,            // what one rank's device knows
  of_all_ranks,   // also what ranks have told each other in peer memory
  crossing_once,  // and where tokens go that cross to a rank once
};
// The placement, rank, tokens and picks of `data` are known.
void take_tables(PlanData& data, PlanTables kind, const TakeTable& take);
// i32 of a plan in a tensor: those of its fixed tables, which are taken once to be counted, and
// all.
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
  // The same in a tensor of the caller's, which is all that the next two need. Waits for nothing.
  void plan_into(const ConstTensorView& expert_ids, const PlanProblems& problems,
                 const TensorView& memory);
  // Not collective.
  std::shared_ptr<PlanData> plan_in(const TensorView& memory, const PlanForm& form) const;
  // Not collective, but the same on every rank. Completes the form of an exact plan, or throws what
  // is wrong with it. (waits)
  PlanForm complete(const TensorView& memory, const PlanForm& form) const;
  PlanProblems problems_of(std::int64_t first_non_finite_token) const;
  // The routing is a caller's: its words are checked.
  PlanProblems problems_of(const Routing& routing) const;

  void resize(const Sizing& sizing);
  Communicator& comm() const { return comm_; }
  const ExpertPlacement& placement() const { return *placement_; }
  // Null unless ranks exchange records in peer memory.
  const std::shared_ptr<PeerMeetings>& meetings() const { return meetings_; }

 private:
  // What the host is told of a plan when it is made.
  enum class Fetch { what_is_needed, nothing };

  std::shared_ptr<PlanData> plan(const ConstTensorView& expert_ids, const PlanProblems& problems,
                                 const TakeTable& take, Fetch fetch);
  RecordHeader header_of(const ConstTensorView& expert_ids) const;
  PlanTables tables() const;
  void require_words(const TensorView& memory, std::int64_t num_tokens, std::int64_t top_k) const;
  bool crosses_once() const;
  Counted count(const ConstTensorView& expert_ids, const PlanProblems& problems,
                PlanData& data) const;
  void plan_alone(const RecordHeader& header, const PlanProblems& problems, PlanData& data);
  void plan_together(RecordHeader header, PlanData& data);
  void plan_in_peer_memory(const RecordHeader& header, const PlanProblems& problems, PlanData& data,
                           Fetch fetch);
  void require_possible(const PlanData& data) const;

  Communicator& comm_;
  std::shared_ptr<const ExpertPlacement> placement_;
  PlanOptions options_;
  Device device_;
  Device host_;  // has memory for what is fetched from a GPU
  PlacementTables device_tables_;
  std::shared_ptr<PeerMeetings> meetings_;
  std::int64_t words_without_picks_ = 0;  // where ranks exchange records in peer memory
  std::int64_t id_;
  std::int64_t num_plans_ = 0;
};

}  // namespace switchyard
