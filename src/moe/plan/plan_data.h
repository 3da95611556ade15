// What a Plan holds.
#pragma once

#include <memory>

#include "moe/dispatch/packed_route.h"
#include "moe/plan/plan_summary.h"
#include "moe/plan/plan_tables.h"
#include "switchyard/plan.h"

namespace switchyard {

struct Plan::Data {
  std::shared_ptr<const ExpertPlacement> placement;
  PlanOptions options;
  Device device;
  Device host;  // the same where that is the host's
  int rank = 0;
  std::int64_t plan_number = 0;  // plans made by the same planner before
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 0;

  // In the device's memory.
  PlanReport report = {};
  GroupTables groups = {};
  TensorView slots = {};         // [T, K] i32
  TensorView target_ranks = {};  // [T, K] i32
  TensorView sources = {};       // [T·K] i32, the first Σ own counts used
  TensorView row_sources = {};   // [row_capacity] i32, at one rank alone

  std::shared_ptr<const PackedRoute> route = {};  // only where the packed mover needs it

  // What the host knows of it; fetched first where it may have changed.
  const PlanSummary& summary() const;
  std::int64_t row_capacity() const;
  bool is_known = true;
  mutable PlanSummary known = {};
};

}  // namespace switchyard
