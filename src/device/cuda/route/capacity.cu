// SPDX-License-Identifier: Apache-2.0
// Limits how many assignments each expert takes. Builds an ordered list of assignments per expert,
// which one block then processes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/route/route_choice.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

struct Limit {
  Assignments all;
  const float* weights = nullptr;
  std::int64_t weight_stride = 0;
  int num_experts = 0;
  double factor = 0.0;
  const std::int64_t* tokens = nullptr;  // [S], `sequence_stride` apart
  std::int64_t sequence_stride = 0;
  std::int64_t num_sequences = 0;
  const std::int32_t* counts = nullptr;     // [E]
  const std::int32_t* positions = nullptr;  // [T·K]: position in the expert's list
  std::int32_t* offsets = nullptr;          // [E + 1]: where each list begins
  std::int32_t* lists = nullptr;            // [T·K]
  std::int64_t* most = nullptr;             // [1]: the most that an expert takes
  std::int32_t* kept_ids = nullptr;
  std::int64_t* dropped = nullptr;

  __device__ float weight(unsigned assignment) const {
    const unsigned token = assignment / all.top_k;
    return weights[token * weight_stride + (assignment - token * all.top_k)];
  }
  __device__ void add_dropped(std::int64_t picks) const {
    if (picks > 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(dropped),
                static_cast<unsigned long long>(picks));
    }
  }
};

// Runs in a single block.
__global__ void begin_lists(const Limit l) {
  __shared__ std::int64_t shared[kWarpLanes];
  std::int64_t tokens_of_thread = 0;
  for (std::int64_t s = threadIdx.x; s < l.num_sequences; s += blockDim.x) {
    tokens_of_thread += l.tokens[s * l.sequence_stride];
  }
  const std::int64_t tokens = block_sums(tokens_of_thread, shared).total;
  if (threadIdx.x == 0) {
    const auto picks = static_cast<double>(tokens * l.all.top_k);
    const double share = picks / l.num_experts * l.factor;
    *l.most = max(std::int64_t{1}, static_cast<std::int64_t>(ceil(min(share, picks))));
    *l.dropped = 0;
  }
  block_offsets(l.counts, l.num_experts, l.offsets, shared);
}

__global__ void fill_lists(const Limit l) {
  for (unsigned i = first_element(); i < l.all.count(); i += element_stride()) {
    const std::int32_t id = l.all.id(i);
    const std::int32_t position = l.positions[i];
    l.kept_ids[i] = id;
    if (position >= 0) l.lists[l.offsets[id] + position] = static_cast<std::int32_t>(i);
  }
}

// Exclusive prefix sum of taken [warps, K] over the warps, in place.
__device__ void scan_taken(const Limit& l, std::int32_t* taken) {
  for (unsigned k = threadIdx.x; k < l.all.top_k; k += blockDim.x) {
    std::int32_t sum = 0;
    for (int w = 0; w < warps_of_block(); ++w) {
      std::int32_t& counter = taken[w * l.all.top_k + k];
      const std::int32_t count = counter;
      counter = sum;
      sum += count;
    }
  }
}

// Processes a warp's part of a list, in order. Returns how many picks the lane dropped.
__device__ std::int32_t keep_first(const Limit& l, unsigned first, unsigned end,
                                   std::int32_t* taken) {
  const std::int64_t most = *l.most;
  const int lane = lane_of_thread();
  std::int32_t dropped = 0;
  for (unsigned at = first; at < end; at += kWarpLanes) {
    const bool is_there = at + lane < end;
    const std::int32_t i = is_there ? l.lists[at + lane] : 0;
    const int k = is_there ? static_cast<int>(static_cast<unsigned>(i) % l.all.top_k) : -1;
    const unsigned same = __match_any_sync(kAllLanes, k);
    const std::int32_t before = is_there ? taken[k] : 0;
    __syncwarp();
    if (is_there && lane == __ffs(static_cast<int>(same)) - 1) taken[k] = before + __popc(same);
    __syncwarp();
    if (is_there && before + __popc(same & lanes_below(lane)) >= most) {
      l.kept_ids[i] = -1;
      ++dropped;
    }
  }
  return dropped;
}

// One block per expert. Limits the picks of each k separately.
__global__ void keep_first_come(const Limit l) {
  extern __shared__ std::int32_t taken[];  // [warps, K]
  const auto begin = static_cast<unsigned>(l.offsets[blockIdx.x]);
  const unsigned count = static_cast<unsigned>(l.offsets[blockIdx.x + 1]) - begin;
  if (count <= *l.most) return;
  for (unsigned i = threadIdx.x; i < warps_of_block() * l.all.top_k; i += blockDim.x) taken[i] = 0;
  __syncthreads();
  const auto warp = static_cast<unsigned>(warp_of_thread());
  const auto warps = static_cast<unsigned>(warps_of_block());
  const unsigned run = (count + warps - 1) / warps;
  const unsigned first = begin + min(run * warp, count);
  const unsigned end = begin + min(run * (warp + 1), count);
  std::int32_t* const own = taken + warp * l.all.top_k;
  for (unsigned at = first + lane_of_thread(); at < end; at += kWarpLanes) {
    atomicAdd(own + static_cast<unsigned>(l.lists[at]) % l.all.top_k, 1);
  }
  __syncthreads();
  scan_taken(l, taken);
  __syncthreads();
  const std::int32_t dropped = warp_sum(keep_first(l, first, end, own));
  if (lane_of_thread() == 0) l.add_dropped(dropped);
}

constexpr unsigned kBins = 256;  // also the number of threads

// The lowest key that is kept, and how many picks with exactly this key are kept.
struct Threshold {
  unsigned key;
  unsigned equal;
};

// Radix select: finds the lowest kept key one byte at a time, from the highest byte down.
__device__ Threshold find_threshold(const Limit& l, unsigned begin, unsigned end, unsigned most,
                                    unsigned* shared) {
  __shared__ unsigned histogram[kBins];
  __shared__ Threshold found;
  Threshold threshold{0, most};
  unsigned known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    histogram[threadIdx.x] = 0;
    __syncthreads();
    for (unsigned at = begin + threadIdx.x; at < end; at += kBins) {
      const unsigned key = key_of(l.weight(static_cast<unsigned>(l.lists[at])));
      if ((key & known) == threshold.key) atomicAdd(&histogram[(key >> shift) % kBins], 1U);
    }
    __syncthreads();
    const unsigned bin = kBins - 1 - threadIdx.x;
    const unsigned count = histogram[bin];
    const unsigned higher = block_sums(count, shared).before;
    if (higher < threshold.equal && threshold.equal <= higher + count) {
      found = {threshold.key | bin << shift, threshold.equal - higher};
    }
    __syncthreads();
    threshold = found;
    known |= (kBins - 1) << shift;
  }
  return threshold;
}

// One block per expert. Among equal weights, the first ones in the list are kept.
__global__ void __launch_bounds__(kBins) keep_highest_weight(const Limit l) {
  __shared__ unsigned shared[kWarpLanes];
  const auto begin = static_cast<unsigned>(l.offsets[blockIdx.x]);
  const auto end = static_cast<unsigned>(l.offsets[blockIdx.x + 1]);
  const std::int64_t most = *l.most;
  if (end - begin <= most) return;
  if (threadIdx.x == 0) l.add_dropped(end - begin - most);
  const Threshold threshold = find_threshold(l, begin, end, static_cast<unsigned>(most), shared);
  unsigned equal_before = 0;
  for (unsigned first = begin; first < end; first += kBins) {
    const unsigned at = first + threadIdx.x;
    const std::int32_t i = at < end ? l.lists[at] : -1;
    const unsigned key = i >= 0 ? key_of(l.weight(static_cast<unsigned>(i))) : 0;
    const bool is_equal = i >= 0 && key == threshold.key;
    const auto equal = block_sums(is_equal ? 1U : 0U, shared);
    const bool has_room = equal_before + equal.before < threshold.equal;
    if (i >= 0 && (is_equal ? !has_room : key < threshold.key)) l.kept_ids[i] = -1;
    equal_before += equal.total;
  }
}

void launch_rule(CapacityRule rule, const Limit& l, Context& context) {
  if (rule == CapacityRule::highest_weight) {
    keep_highest_weight<<<l.num_experts, kBins, 0, context.stream()>>>(l);
    check(cudaGetLastError(), "keep_highest_weight");
    return;
  }
  constexpr unsigned kCounters = 8 * 1024;  // 32 KB, below the default limit for a kernel
  const unsigned warps = std::clamp(kCounters / l.all.top_k, 1U, 8U);
  keep_first_come<<<l.num_experts, warps * kWarpLanes, warps * l.all.top_k * 4, context.stream()>>>(
      l);
  check(cudaGetLastError(), "keep_first_come");
}

}  // namespace

void limit_picks(const LimitPicks& args, Context& context) {
  const std::int64_t experts = args.sums.num_experts;
  const std::int64_t picks = args.expert_ids.shape().num_elements();
  const TensorView zeros = context.take({kProblemWords + experts}, Dtype::i64);
  const TensorView counts = context.take({experts}, Dtype::i32);
  const TensorView scratch = context.take({experts + 2 + 2 * picks}, Dtype::i32);
  const TensorView most = context.take({1}, Dtype::i64);
  auto* const offsets = elements<std::int32_t>(scratch);
  auto* const positions = offsets + experts + 1;
  auto* const distinct = positions + picks;
  context.set_zero(zeros);
  // Counts as a plan of one rank does: ids in range, in order, including a token's duplicates.
  count_assignments(
      {.expert_ids = args.expert_ids,
       .owners = ConstTensorView(reinterpret_cast<const std::int32_t*>(zeros.row(kProblemWords)),
                                 {experts}, Memory::gpu),
       .allow_duplicates = true,
       .counts = counts,
       .distinct_tokens = TensorView(distinct, {1}, Memory::gpu),
       .positions = TensorView(positions, {picks}, Memory::gpu),
       .problems = zeros.slice(0, kProblemWords)},
      context);
  const TensorView& by_sequence = args.sums.by_sequence;
  const Limit l{.all = assignments_of(args.expert_ids),
                .weights = elements<float>(args.weights),
                .weight_stride = args.weights.row_stride(),
                .num_experts = static_cast<int>(experts),
                .factor = args.capacity.factor,
                .tokens = elements<std::int64_t>(by_sequence) + 2 * experts,
                .sequence_stride = by_sequence.row_stride(),
                .num_sequences = by_sequence.rows(),
                .counts = elements<std::int32_t>(counts),
                .positions = positions,
                .offsets = offsets,
                .lists = distinct + 1,
                .most = elements<std::int64_t>(most),
                .kept_ids = elements<std::int32_t>(args.kept_ids),
                .dropped = elements<std::int64_t>(args.dropped)};
  begin_lists<<<1, kElementThreads, 0, context.stream()>>>(l);
  check(cudaGetLastError(), "begin_lists");
  if (picks == 0) return;
  fill_lists<<<blocks_over(picks, context.num_multiprocessors()), kElementThreads, 0,
               context.stream()>>>(l);
  check(cudaGetLastError(), "fill_lists");
  launch_rule(args.capacity.rule, l, context);
}

}  // namespace switchyard::cuda
