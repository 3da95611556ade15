// The small tables of a plan. Those that travel between host and device lie in one piece of memory.
#pragma once

#include "device/device_backend.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard {

// A placement, as devices read it.
struct PlacementTables {
  TensorView all;
  TensorView owners;           // [E] i32
  TensorView experts_by_rank;  // [E] i32
  TensorView rank_offsets;     // [ranks + 1] i32

  static PlacementTables make(const DeviceBackend& device, const ExpertPlacement& placement);
};

// What one rank finds out about its own assignments; at one rank it is all there is to know.
struct PlanReport {
  TensorView all;
  TensorView problems;         // [kProblemWords] i64
  TensorView layout;           // [layout_words(ranks)] i64
  TensorView counts;           // [1, E] i32
  TensorView distinct_tokens;  // [ranks] i32

  static PlanReport take(const DeviceBackend& device, const ExpertPlacement& placement);
  // In the memory of `host`; this one if it is there, otherwise a copy that is waited for.
  PlanReport on_host(const DeviceBackend& device, const DeviceBackend& host,
                     const ExpertPlacement& placement) const;
};

// Where the groups lie, as lay_out says.
struct GroupTables {
  TensorView all;
  TensorView expert_offsets;  // [E], as the next two
  TensorView rows_before;
  TensorView kept_rows;
  TensorView source_offsets;  // [E + 1]
  TensorView row_offsets;     // [local + 1]
  TensorView group_rows;      // [local]

  static GroupTables take(const DeviceBackend& device, const ExpertPlacement& placement, int rank);
};

}  // namespace switchyard
