// SPDX-License-Identifier: Apache-2.0
// The functions of a DeviceBackend on a CPU, listed by source file.
#pragma once

#include <span>

#include "core/memory_cache.h"
#include "device/cpu/workers.h"
#include "device/device_backend.h"

namespace switchyard::cpu {

// plan/count_assignments.cpp
void count_assignments(const CountAssignments& args);
// plan/narrow_ids.cpp
void narrow_ids(const NarrowIds& args);
// plan/lay_out.cpp
void lay_out(const LayOut& args);
// plan/assign_slots.cpp
void assign_slots(const AssignSlots& args);
// route/capacity.cpp
void limit_picks(const LimitPicks& args);
// rows/scatter_rows.cpp
void scatter_rows(const ScatterRows& args, Workers& workers);
// rows/gather_rows.cpp
void gather_rows(const GatherRows& args, Workers& workers);
void dot_rows(const DotRows& args, Workers& workers);
// rows/fill_rows.cpp
void fill_rows(const FillRows& args, Workers& workers);
// route/route.cpp
void route_tokens(const RouteTokens& args, Workers& workers, MemoryCache& memory);
// route/route_backward.cpp
void route_tokens_backward(const RouteTokensBackward& args, Workers& workers, MemoryCache& memory);
// route/losses.cpp
void loss_totals(const LossTotals& args);
void loss_slopes(const LossSlopes& args);
void sum_words(const ConstTensorView& rows, const TensorView& sum);
void count_picks(const RouterSums& sums, const TensorView& statistics);
void output_scales(const OutputScales& args);
void scale_by_expert(const ScaleByExpert& args);
// experts/experts.cpp
void experts_forward(const ExpertsForward& args, Workers& workers);
void experts_backward(const ExpertsBackward& args, Workers& workers, MemoryCache& memory);
// experts/shared_expert.cpp
void shared_forward(const SharedForward& args, Workers& workers);
void shared_backward(const SharedBackward& args, Workers& workers, MemoryCache& memory);
// peer/meet.cpp
void meet(const Meet& args);
// matmul.cpp
void multiply(std::span<const Matmul> products, Workers& workers);

}  // namespace switchyard::cpu
