// Counts assignments: tokens are cut into runs, one a warp, whose counts are added up to the
// positions of one long walk over the ids.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

constexpr unsigned kNoneBad = 0xffffffffU;
constexpr int kMostWarps = 16;
constexpr std::int64_t kMostSharedBytes = 96 * 1024;  // which every GPU from sm_80 on has

struct Count {
  Assignments all;
  const std::int32_t* owners = nullptr;
  int num_experts = 0;
  int num_ranks = 0;
  bool allow_duplicates = false;
  std::int64_t run_tokens = 0;  // of a warp
  int num_blocks = 0;
  std::int32_t* far_counters = nullptr;    // [blocks, warps, E], where they are too many to be near
  std::int32_t* block_counts = nullptr;    // [blocks, E]
  std::int32_t* block_bases = nullptr;     // [blocks, E]
  std::int32_t* block_distinct = nullptr;  // [blocks, ranks]
  std::int32_t* block_bad = nullptr;       // [blocks]: the first bad assignment, or kNoneBad
  std::int32_t* positions = nullptr;
  std::int32_t* counts = nullptr;
  std::int32_t* distinct_tokens = nullptr;
  std::int64_t* problems = nullptr;

  __device__ bool in_range(std::int32_t id) const {
    return static_cast<unsigned>(id) < static_cast<unsigned>(num_experts);
  }
};

// What a warp counts into.
struct Counters {
  std::int32_t* by_expert = nullptr;  // of this warp
  std::int32_t* distinct = nullptr;   // [ranks], of the block
  unsigned* first_bad = nullptr;      // of the block
};

// One lane's assignment.
struct Pick {
  std::int64_t token = 0;
  int k = 0;
  int first_k = 0;  // of the lanes: assignments of the token before it are in no lane
  bool is_there = false;
  unsigned before = 0;  // lanes that hold earlier assignments of the same token
};

__device__ bool has_before(const std::int32_t* row, int end, std::int32_t id) {
  for (int k = 0; k < end; ++k) {
    if (row[k] == id) return true;
  }
  return false;
}

__device__ bool has_rank_before(const Count& c, const std::int32_t* row, int end, int rank) {
  for (int k = 0; k < end; ++k) {
    if (c.in_range(row[k]) && c.owners[row[k]] == rank) return true;
  }
  return false;
}

// A token counts at a rank with the first of its picks there.
__device__ void count_distinct(const Count& c, const Pick& pick, std::int32_t id,
                               std::int32_t* distinct) {
  const int rank = c.in_range(id) ? c.owners[id] : -1;
  const unsigned same = __match_any_sync(kAllLanes, rank);
  const bool is_first = rank >= 0 && (same & pick.before) == 0 &&
                        !has_rank_before(c, c.all.row(pick.token), pick.first_k, rank);
  const unsigned firsts = __ballot_sync(kAllLanes, is_first) & same;
  if (is_first && lane_of_thread() == __ffs(static_cast<int>(firsts)) - 1) {
    atomicAdd(distinct + rank, __popc(firsts));
  }
}

// Called by all lanes of a warp, which hold assignments in order.
__device__ void count_picks_of_lanes(const Count& c, const Pick& pick, const Counters& counters) {
  const int lane = lane_of_thread();
  const std::int32_t* row = c.all.row(pick.token);
  const std::int32_t id = pick.is_there ? row[pick.k] : -1;
  const bool in_range = c.in_range(id);
  const unsigned same = __match_any_sync(kAllLanes, id);
  const bool is_counted =
      in_range &&
      (c.allow_duplicates || ((same & pick.before) == 0 && !has_before(row, pick.first_k, id)));
  const unsigned counted = __ballot_sync(kAllLanes, is_counted) & same;
  const std::int32_t before = is_counted ? counters.by_expert[id] : 0;
  __syncwarp();
  if (is_counted && lane == __ffs(static_cast<int>(counted)) - 1) {
    counters.by_expert[id] = before + __popc(counted);
  }
  __syncwarp();
  count_distinct(c, pick, id, counters.distinct);
  if (!pick.is_there) return;
  const auto assignment = static_cast<unsigned>(pick.token) * c.all.top_k + pick.k;
  c.positions[assignment] = is_counted ? before + __popc(counted & lanes_below(lane)) : -1;
  if (!is_counted && id != -1) atomicMin(counters.first_bad, assignment);
}

// Whole tokens at a time, as many as a warp has lanes for; 32 picks at a time of longer ones.
__device__ void count_run(const Count& c, std::int64_t first, std::int64_t end,
                          const Counters& counters) {
  const int lane = lane_of_thread();
  const int top_k = static_cast<int>(c.all.top_k);
  const int at_once = top_k < kWarpLanes ? kWarpLanes / top_k : 1;
  const int own = top_k < kWarpLanes ? lane / top_k : 0;  // may be one more than there are
  const int first_lane = own * top_k;
  for (std::int64_t t = first; t < end; t += at_once) {
    const std::int64_t token = min(t + own, end - 1);
    for (int first_k = 0; first_k < top_k; first_k += kWarpLanes) {
      const int k = first_k + lane - first_lane;
      const bool is_there = own < at_once && t + own < end && k < top_k;
      const unsigned before = lanes_below(lane) & ~lanes_below(first_lane);
      count_picks_of_lanes(c, {token, k, first_k, is_there, before}, counters);
    }
  }
}

// The positions in a run become those in the block.
__device__ void add_run_bases(const Count& c, std::int64_t first, std::int64_t end,
                              const std::int32_t* bases) {
  const auto last = static_cast<unsigned>(end) * c.all.top_k;
  for (unsigned i = static_cast<unsigned>(first) * c.all.top_k + lane_of_thread(); i < last;
       i += kWarpLanes) {
    const std::int32_t position = c.positions[i];
    if (position >= 0) c.positions[i] = position + bases[c.all.id(i)];
  }
}

// [warps, E]: the counts of every warp become those of the warps before it.
__device__ void scan_warps(const Count& c, std::int32_t* counters) {
  for (int e = static_cast<int>(threadIdx.x); e < c.num_experts; e += blockDim.x) {
    std::int32_t sum = 0;
    for (int w = 0; w < warps_of_block(); ++w) {
      std::int32_t& counter = counters[static_cast<std::int64_t>(w) * c.num_experts + e];
      const std::int32_t count = counter;
      counter = sum;
      sum += count;
    }
    c.block_counts[static_cast<std::int64_t>(blockIdx.x) * c.num_experts + e] = sum;
  }
}

__global__ void __launch_bounds__(kMostWarps* kWarpLanes) count_runs(const Count c) {
  extern __shared__ std::int32_t shared[];  // [ranks], and [warps, E] unless they are far
  __shared__ unsigned first_bad;
  const std::int64_t num_counters = static_cast<std::int64_t>(warps_of_block()) * c.num_experts;
  std::int32_t* const distinct = shared;
  std::int32_t* const counters =
      c.far_counters != nullptr ? c.far_counters + blockIdx.x * num_counters : shared + c.num_ranks;
  for (std::int64_t i = threadIdx.x; i < num_counters; i += blockDim.x) counters[i] = 0;
  for (int r = static_cast<int>(threadIdx.x); r < c.num_ranks; r += blockDim.x) distinct[r] = 0;
  if (threadIdx.x == 0) first_bad = kNoneBad;
  __syncthreads();

  const std::int64_t run =
      static_cast<std::int64_t>(blockIdx.x) * warps_of_block() + warp_of_thread();
  const std::int64_t first = min(run * c.run_tokens, c.all.num_tokens);
  const std::int64_t end = min(first + c.run_tokens, c.all.num_tokens);
  std::int32_t* const own = counters + static_cast<std::int64_t>(warp_of_thread()) * c.num_experts;
  count_run(c, first, end, {own, distinct, &first_bad});
  __syncthreads();
  scan_warps(c, counters);
  for (int r = static_cast<int>(threadIdx.x); r < c.num_ranks; r += blockDim.x) {
    c.block_distinct[static_cast<std::int64_t>(blockIdx.x) * c.num_ranks + r] = distinct[r];
  }
  if (threadIdx.x == 0) c.block_bad[blockIdx.x] = static_cast<std::int32_t>(first_bad);
  __syncthreads();
  add_run_bases(c, first, end, own);
}

__device__ void note_first_bad(const Count& c) {
  unsigned bad = kNoneBad;
  for (int b = lane_of_thread(); b < c.num_blocks; b += kWarpLanes) {
    bad = min(bad, static_cast<unsigned>(c.block_bad[b]));
  }
  bad = __reduce_min_sync(kAllLanes, bad);
  if (lane_of_thread() != 0 || bad == kNoneBad || c.problems[kBadToken] >= 0) return;
  const std::int32_t id = c.all.id(bad);
  c.problems[kBadToken] = bad / c.all.top_k;
  c.problems[kBadK] = bad % c.all.top_k;
  c.problems[kBadId] = id;
  c.problems[kBadIsDuplicate] = c.in_range(id) ? 1 : 0;
}

// A warp an expert; the last block adds up what is not by expert.
__global__ void scan_blocks(const Count c) {
  const int lane = lane_of_thread();
  if (blockIdx.x + 1 == gridDim.x) {
    for (int r = warp_of_thread(); r < c.num_ranks; r += warps_of_block()) {
      std::int32_t tokens = 0;
      for (int b = lane; b < c.num_blocks; b += kWarpLanes) {
        tokens += c.block_distinct[static_cast<std::int64_t>(b) * c.num_ranks + r];
      }
      tokens = warp_sum(tokens);
      if (lane == 0) c.distinct_tokens[r] = tokens;
    }
    if (warp_of_thread() == 0) note_first_bad(c);
    return;
  }
  const int e = static_cast<int>(blockIdx.x) * warps_of_block() + warp_of_thread();
  if (e >= c.num_experts) return;
  const std::int32_t* __restrict__ const counts = c.block_counts + e;
  std::int32_t* __restrict__ const bases = c.block_bases + e;
  std::int32_t before = 0;
#pragma unroll 4
  for (int first = 0; first < c.num_blocks; first += kWarpLanes) {
    const std::int64_t at = static_cast<std::int64_t>(first + lane) * c.num_experts;
    const std::int32_t count = first + lane < c.num_blocks ? counts[at] : 0;
    const std::int32_t up_to = warp_sum_up_to(count);
    if (first + lane < c.num_blocks) bases[at] = before + up_to - count;
    before += __shfl_sync(kAllLanes, up_to, kWarpLanes - 1);
  }
  if (lane == 0) c.counts[e] = before;
}

__global__ void add_block_bases(const Count c, unsigned block_assignments) {
  for (unsigned i = first_element(); i < c.all.count(); i += element_stride()) {
    const std::int32_t position = c.positions[i];
    if (position < 0) continue;
    const std::int64_t block = i / block_assignments;
    c.positions[i] = position + c.block_bases[block * c.num_experts + c.all.id(i)];
  }
}

// How many warps a block has, where their counters lie, and how tokens are cut into runs.
struct Cut {
  int warps = kMostWarps;
  bool is_far = false;
  std::int64_t run_tokens = 1;
  int num_blocks = 0;
};

Cut cut_tokens(const Count& c, int num_multiprocessors) {
  constexpr std::int64_t kLeastOfRun = 64;  // assignments: less is not worth a block's counters
  Cut cut;
  const std::int64_t room = kMostSharedBytes / 4 - c.num_ranks;
  cut.is_far = c.num_experts > room;
  if (!cut.is_far) {
    cut.warps = static_cast<int>(std::min<std::int64_t>(kMostWarps, room / c.num_experts));
  }
  const std::int64_t top_k = c.all.top_k;
  const std::int64_t at_once = std::max<std::int64_t>(1, kWarpLanes / top_k);
  const std::int64_t most_runs = 2LL * num_multiprocessors * cut.warps;
  const std::int64_t least =
      std::max((kLeastOfRun + top_k - 1) / top_k, (c.all.num_tokens + most_runs - 1) / most_runs);
  cut.run_tokens = (least + at_once - 1) / at_once * at_once;
  const std::int64_t of_block = cut.run_tokens * cut.warps;
  cut.num_blocks = static_cast<int>((c.all.num_tokens + of_block - 1) / of_block);
  return cut;
}

void launch_count_runs(const Count& c, const Cut& cut, Context& context) {
  const std::int64_t near = cut.is_far ? 0 : std::int64_t{cut.warps} * c.num_experts;
  const auto bytes = static_cast<std::size_t>((c.num_ranks + near) * 4);
  if (bytes > 47 * 1024) {  // 48 KB need no word, but the kernel has variables of its own
    check(cudaFuncSetAttribute(count_runs, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(kMostSharedBytes)),
          "shared memory for count_runs");
  }
  count_runs<<<cut.num_blocks, cut.warps * kWarpLanes, bytes, context.stream()>>>(c);
  check(cudaGetLastError(), "count_runs");
}

}  // namespace

void count_assignments(const CountAssignments& args, Context& context) {
  Count c{.all = assignments_of(args.expert_ids),
          .owners = elements<std::int32_t>(args.owners),
          .num_experts = static_cast<int>(args.owners.rows()),
          .num_ranks = static_cast<int>(args.distinct_tokens.rows()),
          .allow_duplicates = args.allow_duplicates,
          .positions = elements<std::int32_t>(args.positions),
          .counts = elements<std::int32_t>(args.counts),
          .distinct_tokens = elements<std::int32_t>(args.distinct_tokens),
          .problems = elements<std::int64_t>(args.problems)};
  const Cut cut = cut_tokens(c, context.num_multiprocessors());
  const std::int64_t blocks = cut.num_blocks;
  const std::int64_t by_expert = blocks * c.num_experts;
  const std::int64_t far = cut.is_far ? by_expert * cut.warps : 0;
  const TensorView scratch = context.take(
      {std::max<std::int64_t>(1, 2 * by_expert + blocks * (c.num_ranks + 1) + far)}, Dtype::i32);
  c.run_tokens = cut.run_tokens;
  c.num_blocks = cut.num_blocks;
  c.block_counts = elements<std::int32_t>(scratch);
  c.block_bases = c.block_counts + by_expert;
  c.block_distinct = c.block_bases + by_expert;
  c.block_bad = c.block_distinct + blocks * c.num_ranks;
  if (cut.is_far) c.far_counters = c.block_bad + blocks;

  if (cut.num_blocks > 0) launch_count_runs(c, cut, context);
  constexpr int kScanWarps = 8;
  const int scan_grid = (c.num_experts + kScanWarps - 1) / kScanWarps + 1;
  scan_blocks<<<scan_grid, kScanWarps * kWarpLanes, 0, context.stream()>>>(c);
  check(cudaGetLastError(), "scan_blocks");
  if (cut.num_blocks <= 1) return;  // the positions in the only block are those of the batch
  const auto of_block = static_cast<unsigned>(cut.run_tokens * cut.warps) * c.all.top_k;
  add_block_bases<<<blocks_over(c.all.count(), context.num_multiprocessors()), kElementThreads, 0,
                    context.stream()>>>(c, of_block);
  check(cudaGetLastError(), "add_block_bases");
}

}  // namespace switchyard::cuda
