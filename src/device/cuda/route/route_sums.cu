// SPDX-License-Identifier: Apache-2.0
// Integer sums over tokens, whose order does not matter, and the problem words.
#include <cuda_runtime.h>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/route/route_sums.h"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

using Word = unsigned long long;

constexpr int kChunkTokens = 64;
constexpr int kSumThreads = 128;
constexpr int kMostCounters = 8192;

struct Problems {
  std::int64_t* words;
  const std::int32_t* ids;  // [T, K] as given, or null
  std::int64_t ids_stride;
  std::int64_t top_k;
  int num_experts;
};

__device__ void write_problems(const Problems& p) {
  if (p.words[kNonFiniteToken] == kNoPosition) p.words[kNonFiniteToken] = -1;
  const std::int64_t position = p.words[kBadToken];
  const bool is_bad = position != kNoPosition;
  const std::int64_t token = is_bad ? position / p.top_k : -1;
  const std::int64_t k = is_bad ? position % p.top_k : 0;
  const std::int32_t id = is_bad ? p.ids[token * p.ids_stride + k] : 0;
  p.words[kBadToken] = token;
  p.words[kBadK] = k;
  p.words[kBadId] = id;
  p.words[kBadIsDuplicate] = is_bad && 0 <= id && id < p.num_experts ? 1 : 0;
}

__global__ void problems_kernel(Problems problems) { write_problems(problems); }

struct SumTokens {
  std::int64_t num_tokens;
  std::int64_t sequence_tokens;
  std::int64_t chunks;  // per sequence
  int num_experts;
  int top_k;
  const float* counts;
  const float* scores;  // [T, E] or null
  std::int64_t scores_stride;
  const float* log_sum_exp;  // [T] or null
  const std::int32_t* ids;
  std::int64_t ids_stride;
  Word* by_sequence;
  std::int64_t row_stride;
  Word* squares;
  bool has_counters;  // true if the pick counters fit into shared memory
  Problems problems = {};
};

__device__ void add_to(Word* sum, Word value) {
  if (value != 0) atomicAdd(sum, value);
}

// row[E …] += the scores of the chunk's tokens. `over` [kChunkTokens] is part of TokenSums::counts.
__device__ void add_scores(const SumTokens& s, std::int64_t first, int count, const float* over,
                           Word* row) {
  for (int e = static_cast<int>(threadIdx.x); e < s.num_experts; e += kSumThreads) {
    std::int64_t sum = 0;
#pragma unroll 8
    for (int t = 0; t < count; ++t) {
      if (over[t] == 0.0F) continue;
      const double value = s.scores[(first + t) * s.scores_stride + e];
      sum += static_cast<std::int64_t>(value / (RouterSums::kUnit * over[t]));
    }
    add_to(row + s.num_experts + e, static_cast<Word>(sum));
  }
}

// row[0 …] += the picks of the chunk's tokens.
__device__ void add_picks(const SumTokens& s, std::int64_t first, int count, const float* over,
                          int* counters, Word* row) {
  if (s.has_counters) {
    for (int e = static_cast<int>(threadIdx.x); e < s.num_experts; e += kSumThreads)
      counters[e] = 0;
  }
  __syncthreads();
  const int picks = count * s.top_k;
  for (int i = static_cast<int>(threadIdx.x); i < picks; i += kSumThreads) {
    const int t = i / s.top_k;
    if (over[t] == 0.0F) continue;
    const std::int32_t id = s.ids[(first + t) * s.ids_stride + i % s.top_k];
    if (id < 0 || id >= s.num_experts) continue;
    if (s.has_counters) {
      atomicAdd(counters + id, 1);
    } else {
      atomicAdd(row + id, Word{1});
    }
  }
  __syncthreads();
  if (!s.has_counters) return;
  for (int e = static_cast<int>(threadIdx.x); e < s.num_experts; e += kSumThreads) {
    add_to(row + e, static_cast<Word>(counters[e]));
  }
}

// Adds the squares of one token per thread, whole parts and fractions separately.
__device__ void add_square(const SumTokens& s, std::int64_t token, bool is_counted) {
  Word whole = 0;
  Word fraction = 0;
  if (is_counted) {
    const double value = s.log_sum_exp[token];
    const double square = fmin(value * value, RouterSums::kMostSquare);
    whole = static_cast<Word>(floor(square));
    fraction = static_cast<Word>((square - floor(square)) / RouterSums::kUnit);
  }
  whole = warp_sum(whole);
  fraction = warp_sum(fraction);
  if (lane_of_thread() != 0) return;
  add_to(s.squares, whole);
  add_to(s.squares + 1, fraction);
}

// Each block adds up one chunk of a sequence's tokens.
__global__ __launch_bounds__(kSumThreads) void sums_kernel(SumTokens s) {
  extern __shared__ int counters[];
  __shared__ float over[kChunkTokens];
  static_assert(kChunkTokens <= kSumThreads);
  start_in_turn();
  const std::int64_t sequence = blockIdx.x / s.chunks;
  const std::int64_t begin = sequence * s.sequence_tokens;
  const std::int64_t end = min(begin + s.sequence_tokens, s.num_tokens);
  const std::int64_t first = begin + blockIdx.x % s.chunks * kChunkTokens;
  const int count =
      static_cast<int>(max(std::int64_t{0}, min(std::int64_t{kChunkTokens}, end - first)));
  const int me = static_cast<int>(threadIdx.x);
  const float mine = me < count ? s.counts[first + me] : 0.0F;
  if (me < kChunkTokens) over[me] = mine;
  const int counted = __syncthreads_count(mine != 0.0F);
  Word* row = s.by_sequence + sequence * s.row_stride;
  if (me == 0) add_to(row + 2 * s.num_experts, static_cast<Word>(counted));
  if (s.log_sum_exp != nullptr) add_square(s, first + me, mine != 0.0F);
  if (s.scores != nullptr) add_scores(s, first, count, over, row);
  add_picks(s, first, count, over, counters, row);
  if (blockIdx.x == 0 && me == 0) write_problems(s.problems);
}

const float* floats_of(const std::optional<TensorView>& view) {
  return view ? reinterpret_cast<const float*>(view->data()) : nullptr;
}

SumTokens sums_of(const RouteTokens& args, const TokenSums& tokens) {
  const RouterSums& sums = *args.sums;
  const auto num_tokens = args.in.x.rows();
  const auto sequence = min(sums.sequence_tokens, num_tokens);
  return {.num_tokens = num_tokens,
          .sequence_tokens = sums.sequence_tokens,
          .chunks = (sequence + kChunkTokens - 1) / kChunkTokens,
          .num_experts = args.options.num_experts,
          .top_k = static_cast<int>(args.options.top_k),
          .counts = reinterpret_cast<const float*>(tokens.counts.data()),
          .scores = floats_of(tokens.scores),
          .scores_stride = tokens.scores ? tokens.scores->row_stride() : 0,
          .log_sum_exp = floats_of(tokens.log_sum_exp),
          .ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data()),
          .ids_stride = args.expert_ids.row_stride(),
          .by_sequence = reinterpret_cast<Word*>(sums.by_sequence.data()),
          .row_stride = sums.by_sequence.row_stride(),
          .squares = reinterpret_cast<Word*>(sums.squares.data()),
          .has_counters = args.options.num_experts <= kMostCounters};
}

}  // namespace

void finish_routing(const RouteTokens& args, const TokenSums& tokens, Context& context) {
  Problems problems{.words = reinterpret_cast<std::int64_t*>(args.problems.data()),
                    .ids = nullptr,
                    .ids_stride = 0,
                    .top_k = args.options.top_k,
                    .num_experts = args.options.num_experts};
  if (args.in.expert_ids) {
    problems.ids = reinterpret_cast<const std::int32_t*>(args.in.expert_ids->data());
    problems.ids_stride = args.in.expert_ids->row_stride();
  }
  const auto num_tokens = args.in.x.rows();
  if (args.sums == nullptr || num_tokens == 0) {
    problems_kernel<<<1, 1, 0, context.stream()>>>(problems);
    check(cudaGetLastError(), "problems_kernel");
    return;
  }
  SumTokens sums = sums_of(args, tokens);
  sums.problems = problems;
  const auto sequences = (num_tokens + sums.sequence_tokens - 1) / sums.sequence_tokens;
  const std::size_t shared = sums.has_counters ? sizeof(int) * args.options.num_experts : 0;
  launch_early(sums_kernel, {static_cast<unsigned>(sequences * sums.chunks), kSumThreads, shared},
               sums, "sums_kernel", context);
}

}  // namespace switchyard::cuda
