// SPDX-License-Identifier: Apache-2.0
// Makes the whole plan of a rank that is alone in one block. With few tokens the launches of
// separate kernels would take longer than their work.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/plan/count.cuh"
#include "device/cuda/plan/layout.cuh"
#include "device/cuda/plan/slots.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kMostAloneWarps = 32;
constexpr int kLeastAloneWarps = 8;             // with room for fewer, several blocks are faster
constexpr std::int64_t kMostAlonePicks = 2048;  // more take longer in one block than in several

template <typename Id>
struct Alone {
  const Id* ids = nullptr;
  std::int64_t stride = 0;
  Narrowing narrowing;
  const std::int64_t* router_problems = nullptr;  // or null
  std::int64_t first_non_finite_token = -1;
  // The kernel replaces what it has in shared memory.
  Count count;
  Layout layout;
  Slots slots;
};

// The tables in shared memory: the kernel's input, so that it waits for global memory only once,
// and what no other kernel reads.
struct AloneTables {
  std::int64_t* totals;           // [E]
  std::int32_t* counts;           // [columns]
  std::int32_t* owners;           // [E]
  std::int32_t* experts_by_rank;  // [E]
  std::int32_t* rank_offsets;     // [2]
  std::int32_t* ids;              // [T, K]
  std::int32_t* positions;        // [T·K]
  std::int32_t* counters;         // [warps, columns]

  __device__ AloneTables(std::int64_t* memory, const Count& c)
      : totals(memory),
        counts(reinterpret_cast<std::int32_t*>(totals + c.num_experts)),
        owners(counts + c.num_columns()),
        experts_by_rank(owners + c.num_experts),
        rank_offsets(experts_by_rank + c.num_experts),
        ids(rank_offsets + 2),
        positions(ids + c.all.count()),
        counters(positions + c.all.count()) {}

  static std::int64_t bytes_without_counters(const Count& c) {
    const std::int64_t experts = c.num_experts;
    const std::int64_t picks = c.all.num_tokens * c.all.top_k;
    return 8 * experts + 4 * (c.num_columns() + 2 * experts + 2 + 2 * picks);
  }
  static std::int64_t bytes_of_counters(const Count& c, std::int64_t warps) {
    return 4 * warps * c.num_columns();
  }
};

template <typename Id>
__device__ void load_inputs(const Alone<Id>& a, const AloneTables& to) {
  const unsigned top_k = a.count.all.top_k;
  for (unsigned i = threadIdx.x; i < a.count.all.count(); i += blockDim.x) {
    const unsigned token = i / top_k;
    to.ids[i] = a.narrowing(a.ids[token * a.stride + (i - token * top_k)]);
  }
  for (int e = static_cast<int>(threadIdx.x); e < a.count.num_experts; e += blockDim.x) {
    to.owners[e] = a.count.owners[e];
    to.experts_by_rank[e] = a.layout.experts_by_rank[e];
  }
  if (threadIdx.x < 2) to.rank_offsets[threadIdx.x] = a.layout.rank_offsets[threadIdx.x];
}

// Sets the problem words to those before counting.
template <typename Id>
__device__ void set_problems(const Alone<Id>& a) {
  const auto i = static_cast<int>(threadIdx.x);
  if (i >= kProblemWords) return;
  const std::int64_t none = i == kNonFiniteToken ? a.first_non_finite_token
                            : i == kBadToken     ? -1
                                                 : 0;
  a.count.problems[i] = a.router_problems != nullptr ? a.router_problems[i] : none;
}

template <typename Id>
__global__ void __launch_bounds__(kMostAloneWarps* kWarpLanes)
    plan_alone_kernel(const __grid_constant__ Alone<Id> a) {
  extern __shared__ std::int64_t alone_memory[];
  start_in_turn();
  const AloneTables tables(alone_memory, a.count);
  load_inputs(a, tables);
  set_problems(a);
  Count c = a.count;
  c.all.ids = tables.ids;
  c.all.stride = c.all.top_k;
  c.owners = tables.owners;
  c.positions = tables.positions;
  c.block_counts = tables.counts;
  count_block(c, tables.counters);  // has a barrier before it reads anything
  Layout l = a.layout;
  l.counts.first = tables.counts;
  l.experts_by_rank = tables.experts_by_rank;
  l.rank_offsets = tables.rank_offsets;
  l.totals = tables.totals;
  lay_out_ranks(l);
  Slots s = a.slots;
  s.all = c.all;
  s.owners = tables.owners;
  s.positions = tables.positions;
  __syncthreads();
  fill_slots(s);
}

// Returns how many warps the block has, or 0 if a single block is not enough.
int alone_warps(const Count& c) {
  const std::int64_t picks = c.all.num_tokens * c.all.top_k;
  if (picks > kMostAlonePicks) return 0;
  const std::int64_t room = std::int64_t{kMostSharedBytes} - AloneTables::bytes_without_counters(c);
  const std::int64_t most =
      std::min<std::int64_t>(kMostAloneWarps, room / AloneTables::bytes_of_counters(c, 1));
  if (most < kLeastAloneWarps) return 0;
  const std::int64_t wanted = std::max<std::int64_t>(picks, c.num_experts);
  return static_cast<int>(
      std::clamp<std::int64_t>((wanted + kWarpLanes - 1) / kWarpLanes, 1, most));
}

// Returns how many tokens each warp counts.
std::int64_t alone_run(const Assignments& all, int warps) {
  const std::int64_t at_once = std::max<std::int64_t>(1, kWarpLanes / all.top_k);
  const std::int64_t of_all = at_once * warps;
  return (all.num_tokens + of_all - 1) / of_all * at_once;
}

template <typename Id>
void launch_alone(const PlanAlone& args, const Count& count, int warps, Context& context) {
  AssignSlots slots = args.slots;
  slots.expert_ids = args.expert_ids;
  const auto& problems = args.problems;
  const Alone<Id> a{
      .ids = elements<Id>(args.expert_ids),
      .stride = args.expert_ids.row_stride(),
      .narrowing = Narrowing(args.first_sentinel),
      .router_problems = problems.words ? elements<std::int64_t>(*problems.words) : nullptr,
      .first_non_finite_token = problems.first_non_finite_token,
      .count = count,
      .layout = layout_of(args.layout, nullptr),
      .slots = slots_of(slots)};
  const auto bytes =
      AloneTables::bytes_without_counters(count) + AloneTables::bytes_of_counters(count, warps);
  launch_early(plan_alone_kernel<Id>,
               {.threads = static_cast<unsigned>(warps * kWarpLanes),
                .shared_bytes = static_cast<std::size_t>(bytes)},
               a, "plan_alone_kernel", context);
}

}  // namespace

bool plan_alone(const PlanAlone& args, Context& context) {
  CountAssignments counted = args.count;
  counted.expert_ids = args.expert_ids;
  Count count = count_of(counted);
  const int warps = alone_warps(count);
  if (warps == 0) return false;
  count.num_blocks = 1;
  count.run_tokens = alone_run(count.all, warps);
  if (args.expert_ids.dtype() == Dtype::i64) {
    launch_alone<std::int64_t>(args, count, warps, context);
  } else {
    launch_alone<std::int32_t>(args, count, warps, context);
  }
  return true;
}

}  // namespace switchyard::cuda
