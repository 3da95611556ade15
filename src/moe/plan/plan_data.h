// SPDX-License-Identifier: Apache-2.0
// The data behind a Plan, and what the host knows of it: counts, problems and sizes.
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

// Returns the record of a single rank from its report in host memory.
PlanRecords record_of(const PlanReport& report);
// Returns the records of all ranks from the reports that they exchanged when they met. The reports
// are in host memory.
PlanRecords records_of(const PeerReports& reports);
// True if the ranks have met. A failed meeting leaves zeros.
inline bool have_met(const PlanRecords& records) { return records.headers.front().ids_dims != 0; }

struct PlanSummary {
  std::vector<std::int32_t> counts;           // [ranks, E] by source rank
  std::vector<std::int32_t> distinct_tokens;  // [ranks, ranks] by source, then target
  PlanStatus status;
  std::int64_t num_rows = 0;     // rows of this rank
  std::int64_t num_sources = 0;  // assignments of this rank
  std::int64_t num_remote = 0;   // assignments of this rank that have a slot at another rank
  std::int64_t num_tokens = 0;   // tokens that this rank receives, if tokens cross once

  // Fills the summary from the records and `layout`, [layout_words(ranks)] i64 in host memory.
  // Vectors whose size does not change keep their storage.
  void fill(const PlanRecords& records, const ConstTensorView& layout, const Sizing& sizing,
            int rank);
};

// Throws for bad ids or non-finite logits, as an exact plan does.
void require_sound_routing(const PlanStatus& status);
// Throws if a rank would have more rows than 32 bits can index.
void require_nameable_rows(const PlanSummary& summary, const ExpertPlacement& placement,
                           const Sizing& sizing);
// Like Plan::check, for a status that outlives its plan.
void check_status(const PlanStatus& status, const Sizing& sizing);

struct PlanData {
  std::shared_ptr<const ExpertPlacement> placement;
  PlanOptions options;
  Device device;
  Device host;  // the same as `device` if that works in host memory
  int rank = 0;
  // Equal on all ranks that move by the same plan: how many plans the planner made before, or for a
  // plan in a tensor a hash of its form.
  std::int64_t plan_number = 0;
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;

  // In the device's memory.
  PlanReport report = {};
  GroupTables groups = {};
  TensorView slots = {};         // [T, K] i32
  TensorView target_ranks = {};  // [T, K] i32
  TensorView sources = {};       // [T·K] i32; only the first num_sources are used
  TensorView row_sources = {};   // [row_capacity] i32, only at one rank

  // Set only if the ranks meet in peer memory; `places` and `sent_sources` only if tokens cross to
  // a rank once (see SentTokens).
  std::optional<PeerReports> reports = {};
  TensorView places = {};                     // [T, K] i32
  TensorView sent_sources = {};               // [T, K] i32
  std::weak_ptr<const PeerCheck> check = {};  // throws if one of these ranks has failed
  bool crosses_once() const { return places.data() != nullptr; }

  std::shared_ptr<const PackedRoute> route = {};  // only with the packed mover

  // Returns what the host knows of the plan. Fetches it first if it may have changed.
  const PlanSummary& summary() const;
  std::int64_t row_capacity() const;
  std::int64_t token_capacity() const;  // only if tokens cross once
  std::int64_t bytes() const;           // size of the tables in device memory
  bool is_known = true;
  mutable PlanSummary known = {};
};

inline Plan plan_of(std::shared_ptr<const PlanData> data) { return Plan(std::move(data)); }
inline const PlanData& data_of(const Plan& plan) { return *plan.data_; }

}  // namespace switchyard
