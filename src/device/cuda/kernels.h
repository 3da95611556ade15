// SPDX-License-Identifier: Apache-2.0
// The functions of a DeviceBackend on a GPU, listed by the source file that defines them.
#pragma once

#include <cstdint>
#include <span>

#include "device/cuda/runtime/context.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

// plan/count_assignments.cu
void count_assignments(const CountAssignments& args, Context& context);
// plan/narrow_ids.cu
void narrow_ids(const NarrowIds& args, Context& context);
// plan/lay_out.cu
void lay_out(const LayOut& args, Context& context);
// plan/assign_slots.cu
void assign_slots(const AssignSlots& args, Context& context);
// plan/plan_alone.cu; does nothing and returns false if the plan is too large for it
bool plan_alone(const PlanAlone& args, Context& context);
// route/capacity.cu
void limit_picks(const LimitPicks& args, Context& context);
// rows/scatter_rows.cu
void scatter_rows(const ScatterRows& args, Context& context);
// rows/gather_rows.cu
void gather_rows(const GatherRows& args, Context& context);
void dot_rows(const DotRows& args, Context& context);
// rows/fill_rows.cu
void fill_rows(const FillRows& args, Context& context);
// route/route.cu
void route_tokens(const RouteTokens& args, Context& context);
// route/route_backward.cu
void route_tokens_backward(const RouteTokensBackward& args, Context& context);
// route/losses.cu
void loss_totals(const LossTotals& args, Context& context);
void loss_slopes(const LossSlopes& args, Context& context);
void sum_words(const ConstTensorView& rows, const TensorView& sum, Context& context);
void count_picks(const RouterSums& sums, const TensorView& statistics, Context& context);
void output_scales(const OutputScales& args, Context& context);
void scale_by_expert(const ScaleByExpert& args, Context& context);
// experts/experts.cpp
void experts_forward(const ExpertsForward& args, Context& context);
void experts_backward(const ExpertsBackward& args, Context& context);
// experts/shared_expert.cpp
void shared_forward(const SharedForward& args, Context& context);
void shared_backward(const SharedBackward& args, Context& context);
// peer/meet.cu
void meet(const Meet& args, Context& context);
// matmul.cu
void multiply(std::span<const Matmul> products, Context& context);
// memory.cu
void zero_padding(const TensorView& rows, const ConstTensorView& valid, Context& context);
void spoil(const std::uint32_t* failed, std::span<const TensorView> views, Context& context);
void copy_rows(const ConstTensorView& from, const TensorView& to, Context& context);
void upload_words(std::span<const std::byte> from, void* to, CUstream_st* stream);

}  // namespace switchyard::cuda
