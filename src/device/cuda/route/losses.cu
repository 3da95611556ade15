// SPDX-License-Identifier: Apache-2.0
// Small sums and products for a router's losses: integers, and doubles with the same bits as on the
// host.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

// The rows of RouterSums::by_sequence, in the form that kernels use.
struct LossSums {
  const std::int64_t* by_sequence = nullptr;
  std::int64_t stride = 0;
  std::int64_t num_sequences = 0;
  std::int64_t num_experts = 0;

  __device__ std::int64_t picks(std::int64_t s, std::int64_t e) const {
    return by_sequence[s * stride + e];
  }
  __device__ std::int64_t scores(std::int64_t s, std::int64_t e) const {
    return by_sequence[s * stride + num_experts + e];
  }
  __device__ std::int64_t tokens(std::int64_t s) const {
    return by_sequence[s * stride + 2 * num_experts];
  }
  // Sums column `c` over the sequences `first` … `last` − 1.
  __device__ std::int64_t column(std::int64_t c, std::int64_t first, std::int64_t last) const {
    std::int64_t sum = 0;
#pragma unroll 8
    for (std::int64_t s = first; s < last; ++s) sum += by_sequence[s * stride + c];
    return sum;
  }
};

LossSums sums_of(const ConstTensorView& by_sequence) {
  return {elements<std::int64_t>(by_sequence), by_sequence.row_stride(), by_sequence.rows(),
          by_sequence.shape()[1] / 2};
}

constexpr int kLossThreads = 128;

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kLossThreads - 1) / kLossThreads);
}
__device__ std::int64_t thread_in_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Returns the factor that turns Σ picks · scores into the loss E · Σ f_e · P_e.
__device__ double balance_factor(std::int64_t num_experts, std::int64_t num_tokens,
                                 std::int64_t top_k) {
  const auto tokens = static_cast<double>(num_tokens);
  return num_tokens == 0
             ? 0.0
             : static_cast<double>(num_experts) / (tokens * tokens * static_cast<double>(top_k));
}

// Called by a warp. Has the same bits as on the host: products and sums are rounded separately, and
// experts are added in order. Lanes without an expert add 0, which changes nothing.
__device__ double balance_loss(const LossSums& sums, std::int64_t s, std::int64_t top_k) {
  double sum = 0.0;
  for (std::int64_t first = 0; first < sums.num_experts; first += kWarpLanes) {
    const std::int64_t e = first + lane_of_thread();
    double product = 0.0;
    if (e < sums.num_experts) {
      const double score = static_cast<double>(sums.scores(s, e)) * RouterSums::kUnit;
      product = __dmul_rn(static_cast<double>(sums.picks(s, e)), score);
    }
#pragma unroll
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      sum = __dadd_rn(sum, __shfl_sync(kAllLanes, product, lane));
    }
  }
  return __dmul_rn(sum, balance_factor(sums.num_experts, sums.tokens(s), top_k));
}

struct TotalsWork {
  LossSums own;
  LossSums joined;                        // the sums that sequences are counted from
  const std::int64_t* squares = nullptr;  // [2]
  std::int64_t top_k = 0;
  bool counts_sequences = true;
  bool has_sequence_losses = false;
  std::int64_t* totals = nullptr;  // [num_words]
  std::int64_t num_words = 0;
  // Pointers into totals:
  std::int64_t* square_words = nullptr;  // [2]
  std::int64_t* sequences = nullptr;     // [3]: their number, whole parts of losses, fractions
};

__device__ void add_to(std::int64_t* word, std::int64_t value) {
  if (value != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
  }
}

constexpr int kTotalsThreads = 512;
constexpr int kBlockSequences = kTotalsThreads / kWarpLanes;  // one per warp

__device__ void count_sequence(const TotalsWork& work, std::int64_t s) {
  __shared__ std::int64_t shared[kWarpLanes];
  std::int64_t counted[3] = {0, 0, 0};  // same order as TotalsWork::sequences
  if (s < work.joined.num_sequences && work.joined.tokens(s) != 0) {
    const double loss = work.has_sequence_losses ? balance_loss(work.joined, s, work.top_k) : 0.0;
    const double whole = floor(loss);
    if (lane_of_thread() == 0) {
      counted[0] = 1;
      counted[1] = static_cast<std::int64_t>(whole);
      counted[2] = static_cast<std::int64_t>((loss - whole) / RouterSums::kUnit);
    }
  }
  for (int i = 0; i < 3; ++i) {
    const std::int64_t of_block = block_sums(counted[i], shared).total;
    if (threadIdx.x == 0) add_to(work.sequences + i, of_block);
  }
}

// Each block adds some sequences to the totals. If there is only one block, it zeroes them first.
__global__ void __launch_bounds__(kTotalsThreads) add_up_losses(const TotalsWork work) {
  if (gridDim.x == 1) {
    for (std::int64_t i = threadIdx.x; i < work.num_words; i += kTotalsThreads) work.totals[i] = 0;
    __syncthreads();
  }
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kBlockSequences;
  const std::int64_t last = min(first + kBlockSequences, work.own.num_sequences);
  for (std::int64_t c = threadIdx.x; c <= 2 * work.own.num_experts; c += kTotalsThreads) {
    add_to(work.totals + c, work.own.column(c, first, last));
  }
  if (blockIdx.x == 0 && threadIdx.x < 2) {
    work.square_words[threadIdx.x] = work.squares[threadIdx.x];
  }
  if (work.counts_sequences) count_sequence(work, first + warp_of_thread());
}

}  // namespace

void loss_totals(const LossTotals& args, Context& context) {
  const RouterSums& sums = args.sums;
  const ConstTensorView joined = args.joined.value_or(sums.by_sequence);
  auto* const totals = elements<std::int64_t>(args.totals);
  const TotalsWork work{
      .own = sums_of(sums.by_sequence),
      .joined = sums_of(joined),
      .squares = elements<std::int64_t>(ConstTensorView(sums.squares)),
      .top_k = args.top_k,
      .counts_sequences = args.counts_sequences,
      .has_sequence_losses = sums.losses.balance == BalanceLoss::sequence,
      .totals = totals,
      .num_words = loss_total_words(sums.num_experts),
      .square_words = totals + squares_word(sums.num_experts),
      .sequences = totals + sequences_word(sums.num_experts),
  };
  const std::int64_t blocks =
      std::max<std::int64_t>((sums.num_sequences() + kBlockSequences - 1) / kBlockSequences, 1);
  if (blocks > 1) context.set_zero(args.totals);
  add_up_losses<<<static_cast<unsigned>(blocks), kTotalsThreads, 0, context.stream()>>>(work);
  check(cudaGetLastError(), "add_up_losses");
}

namespace {

struct Slopes {
  LossSums sums;
  const std::int64_t* picks = nullptr;          // [E], in the totals
  const std::int64_t* num_tokens = nullptr;     // [1]
  const std::int64_t* num_sequences = nullptr;  // [1]
  std::int64_t top_k = 0;
  RouterLosses d_losses;
  bool is_by_sequence = false;
  float* by_score = nullptr;  // [S, E]
  std::int64_t by_score_stride = 0;
  float* by_square = nullptr;  // [1]

  __device__ double factor(std::int64_t tokens) const {
    return balance_factor(sums.num_experts, tokens, top_k);
  }
};

// Each row of blocks handles one sequence; with more sequences than rows, it handles several.
__global__ void fill_slopes(const Slopes slopes) {
  const std::int64_t num_experts = slopes.sums.num_experts;
  const std::int64_t num_tokens = *slopes.num_tokens;
  const std::int64_t e = thread_in_grid();
  if (e == 0 && blockIdx.y == 0 && slopes.by_square != nullptr) {
    const double z = slopes.d_losses.z;
    *slopes.by_square =
        num_tokens > 0 ? static_cast<float>(z / static_cast<double>(num_tokens)) : 0.0F;
  }
  if (slopes.by_score == nullptr || e >= num_experts) return;
  const double d_balance = slopes.d_losses.balance;
  const std::int64_t with_tokens = *slopes.num_sequences;
  const auto sequences = static_cast<double>(with_tokens > 1 ? with_tokens : 1);
  for (std::int64_t s = blockIdx.y; s < slopes.sums.num_sequences; s += gridDim.y) {
    const double factor = slopes.is_by_sequence
                              ? d_balance / sequences * slopes.factor(slopes.sums.tokens(s))
                              : d_balance * slopes.factor(num_tokens);
    const std::int64_t picks = slopes.is_by_sequence ? slopes.sums.picks(s, e) : slopes.picks[e];
    slopes.by_score[s * slopes.by_score_stride + e] =
        static_cast<float>(static_cast<double>(picks) * factor);
  }
}

}  // namespace

void loss_slopes(const LossSlopes& args, Context& context) {
  if (args.slopes.is_zero()) return;
  const auto& by_score = args.slopes.by_score;
  const auto& by_square = args.slopes.by_square;
  const auto* const totals = elements<std::int64_t>(args.totals);
  const auto experts = args.sums.num_experts;
  const Slopes slopes{.sums = sums_of(args.sums.by_sequence),
                      .picks = totals + picks_word(experts),
                      .num_tokens = totals + tokens_word(experts),
                      .num_sequences = totals + sequences_word(experts),
                      .top_k = args.top_k,
                      .d_losses = args.d_losses,
                      .is_by_sequence = args.sums.losses.balance == BalanceLoss::sequence,
                      .by_score = by_score ? elements<float>(*by_score) : nullptr,
                      .by_score_stride = by_score ? by_score->row_stride() : 0,
                      .by_square = by_square ? elements<float>(*by_square) : nullptr};
  const std::int64_t rows = std::clamp<std::int64_t>(slopes.sums.num_sequences, 1, 1024);
  const dim3 grid(blocks_for(slopes.sums.num_experts), static_cast<unsigned>(rows));
  fill_slopes<<<grid, kLossThreads, 0, context.stream()>>>(slopes);
  check(cudaGetLastError(), "fill_slopes");
}

namespace {

__global__ void sum_words_kernel(const std::int64_t* rows, std::int64_t stride,
                                 std::int64_t num_rows, std::int64_t num_words, std::int64_t* sum) {
  const std::int64_t i = thread_in_grid();
  if (i >= num_words) return;
  std::int64_t word = 0;
#pragma unroll 8
  for (std::int64_t r = 0; r < num_rows; ++r) word += rows[r * stride + i];
  sum[i] = word;
}

}  // namespace

void sum_words(const ConstTensorView& rows, const TensorView& sum, Context& context) {
  if (sum.rows() == 0) return;
  sum_words_kernel<<<blocks_for(sum.rows()), kLossThreads, 0, context.stream()>>>(
      elements<std::int64_t>(rows), rows.row_stride(), rows.rows(), sum.rows(),
      elements<std::int64_t>(sum));
  check(cudaGetLastError(), "sum_words");
}

namespace {

__global__ void add_to_statistics(const LossSums sums, std::int64_t* statistics) {
  const std::int64_t i = thread_in_grid();
  if (i > sums.num_experts) return;
  const std::int64_t column = i < sums.num_experts ? i : 2 * sums.num_experts;
  statistics[i] += sums.column(column, 0, sums.num_sequences);
}

// One warp per expert. The mean is over the experts with the same owner, or over all.
__global__ void fill_output_scales(const std::int64_t* picks, const std::int32_t* owners,
                                   std::int64_t num_experts, bool by_rank, float* scales) {
  const std::int64_t e = thread_in_grid() / kWarpLanes;
  if (e >= num_experts) return;
  std::int64_t rows = 0;
  std::int64_t experts = 0;
  for (std::int64_t other = lane_of_thread(); other < num_experts; other += kWarpLanes) {
    if (by_rank && owners[other] != owners[e]) continue;
    rows += picks[other];
    ++experts;
  }
  rows = warp_sum(rows);
  experts = warp_sum(experts);
  if (lane_of_thread() != 0) return;
  const double mean = static_cast<double>(rows) / static_cast<double>(experts);
  scales[e] = picks[e] == 0 ? 1.0F : static_cast<float>(mean / static_cast<double>(picks[e]));
}

__global__ void multiply_by_expert(const Assignments all, const float* scales, int num_experts,
                                   const float* from, std::int64_t from_stride, float* to,
                                   std::int64_t to_stride) {
  for (unsigned i = first_element(); i < all.count(); i += element_stride()) {
    const std::int64_t token = i / all.top_k;
    const std::int64_t k = i % all.top_k;
    const std::int32_t id = all.row(token)[k];
    const float value = from[token * from_stride + k];
    const bool is_pick = static_cast<unsigned>(id) < static_cast<unsigned>(num_experts);
    to[token * to_stride + k] = is_pick ? value * scales[id] : value;
  }
}

}  // namespace

void count_picks(const RouterSums& sums, const TensorView& statistics, Context& context) {
  add_to_statistics<<<blocks_for(sums.num_experts + 1), kLossThreads, 0, context.stream()>>>(
      sums_of(sums.by_sequence), elements<std::int64_t>(statistics));
  check(cudaGetLastError(), "add_to_statistics");
}

void output_scales(const OutputScales& args, Context& context) {
  const std::int64_t num_experts = args.picks.rows();
  fill_output_scales<<<blocks_for(num_experts * kWarpLanes), kLossThreads, 0, context.stream()>>>(
      elements<std::int64_t>(args.picks), elements<std::int32_t>(args.owners), num_experts,
      args.rule == GradientScale::rank, elements<float>(args.scales));
  check(cudaGetLastError(), "fill_output_scales");
}

void scale_by_expert(const ScaleByExpert& args, Context& context) {
  const Assignments all = assignments_of(args.expert_ids);
  if (all.count() == 0) return;
  multiply_by_expert<<<blocks_over(all.count(), context.num_multiprocessors()), kElementThreads, 0,
                       context.stream()>>>(all, elements<float>(args.scales),
                                           static_cast<int>(args.scales.rows()),
                                           elements<float>(args.from), args.from.row_stride(),
                                           elements<float>(args.to), args.to.row_stride());
  check(cudaGetLastError(), "multiply_by_expert");
}

}  // namespace switchyard::cuda
