// What the host knows of a plan: everybody's counts, what went wrong, and the sizes.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/plan/plan_record.h"
#include "moe/plan/plan_tables.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// The record of a rank that is alone, from its report in the host's memory.
PlanRecords record_of(const PlanReport& report);

struct PlanSummary {
  std::vector<std::int32_t> counts;           // [ranks, E] by source rank
  std::vector<std::int32_t> distinct_tokens;  // [ranks, ranks] by source, then target
  PlanStatus status;
  std::int64_t num_rows = 0;     // of this rank
  std::int64_t num_sources = 0;  // assignments of this rank

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

}  // namespace switchyard
