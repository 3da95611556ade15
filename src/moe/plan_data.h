// What a Plan holds.
#pragma once

#include <memory>
#include <vector>

#include "moe/packed_route.h"
#include "switchyard/plan.h"

namespace switchyard {

struct Plan::Data {
  std::shared_ptr<const ExpertPlacement> placement;
  PlanOptions options;
  int rank = 0;
  std::int64_t plan_number = 0;  // plans made by the same planner before
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;

  std::vector<std::int32_t> counts;           // [ranks, E] by source rank
  std::vector<std::int32_t> distinct_tokens;  // [ranks, ranks] by source, then target
  Tensor row_offsets;                         // [local experts + 1]
  Tensor group_rows;                          // [local experts]
  Tensor slots;                               // [T, K]
  Tensor target_ranks;                        // [T, K]
  Tensor sources;                             // [T·K], the first Σ own counts used
  Tensor source_offsets;                      // [E + 1]
  PlanStatus status;

  std::shared_ptr<const PackedRoute> route;  // only where the packed mover needs it
};

// As Plan::check, for a status that outlives its plan.
void check_status(const PlanStatus& status, const Sizing& sizing);

}  // namespace switchyard
