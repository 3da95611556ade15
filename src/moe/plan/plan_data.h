// What a Plan holds, and what the host knows of it: counts, what went wrong, and sizes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "moe/dispatch/packed_route.h"
#include "moe/plan/plan_record.h"
#include "moe/plan/plan_tables.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The record of a rank that is alone, from its report in the host's memory.
PlanRecords record_of(const PlanReport& report);
// The records of ranks that have met, in the host's memory.
PlanRecords records_of(const PeerReports& reports);
// Whether that is so: a meeting that failed leaves zeros.
inline bool have_met(const PlanRecords& records) { return records.headers.front().ids_dims != 0; }

struct PlanSummary {
  std::vector<std::int32_t> counts;           // [ranks, E] by source rank
  std::vector<std::int32_t> distinct_tokens;  // [ranks, ranks] by source, then target
  PlanStatus status;
  std::int64_t num_rows = 0;     // of this rank
  std::int64_t num_sources = 0;  // assignments of this rank
  std::int64_t num_remote = 0;   // those of them that have a slot at another rank
  std::int64_t num_tokens = 0;   // that this rank receives, where they cross once

  // layout [layout_words(ranks)] i64 in the host's memory. Vectors of the same size stay where they
  // are.
  void fill(const PlanRecords& records, const ConstTensorView& layout, const Sizing& sizing,
            int rank);
};

// Throws what an exact plan throws: bad ids, or logits that are not finite.
void require_sound_routing(const PlanStatus& status);
// Throws if a rank would have more rows than 32 bits can name.
void require_nameable_rows(const PlanSummary& summary, const ExpertPlacement& placement,
                           const Sizing& sizing);
// As Plan::check, for a status that outlives its plan.
void check_status(const PlanStatus& status, const Sizing& sizing);

struct PlanData {
  std::shared_ptr<const ExpertPlacement> placement;
  PlanOptions options;
  Device device;
  Device host;  // the same where that is the host's
  int rank = 0;
  // Of ranks that move by the same plan: the plans made by the same planner before, or what tells
  // the forms of plans in tensors apart.
  std::int64_t plan_number = 0;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;

  // In the device's memory.
  PlanReport report = {};
  GroupTables groups = {};
  TensorView slots = {};         // [T, K] i32
  TensorView target_ranks = {};  // [T, K] i32
  TensorView sources = {};       // [T·K] i32, the first Σ own counts used
  TensorView row_sources = {};   // [row_capacity] i32, at one rank alone

  // Where ranks met in peer memory; and where tokens cross to a rank once, as SentTokens says.
  std::optional<PeerReports> reports = {};
  TensorView places = {};                     // [T, K] i32
  TensorView sent_sources = {};               // [T, K] i32
  std::weak_ptr<const PeerCheck> check = {};  // of these ranks
  bool crosses_once() const { return places.data() != nullptr; }

  std::shared_ptr<const PackedRoute> route = {};  // only where the packed mover needs it

  // What the host knows of it; fetched first where it may have changed.
  const PlanSummary& summary() const;
  std::int64_t row_capacity() const;
  std::int64_t token_capacity() const;  // where tokens cross once
  std::int64_t bytes() const;           // of tables that are held in the device's memory
  bool is_known = true;
  mutable PlanSummary known = {};
};

inline Plan plan_of(std::shared_ptr<const PlanData> data) { return Plan(std::move(data)); }
inline const PlanData& data_of(const Plan& plan) { return *plan.data_; }

}  // namespace switchyard
