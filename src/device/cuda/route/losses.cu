// Small sums and products around a router's losses: whole numbers, and doubles rounded once.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

// RouterSums as kernels see them.
struct LossSums {
  const std::int64_t* by_sequence = nullptr;
  std::int64_t stride = 0;
  std::int64_t num_sequences = 0;
  std::int64_t num_experts = 0;

  __device__ std::int64_t picks(std::int64_t s, std::int64_t e) const {
    return by_sequence[s * stride + e];
  }
  __device__ std::int64_t tokens(std::int64_t s) const {
    return by_sequence[s * stride + 2 * num_experts];
  }
  // Over sequences: picks of expert e < E, or tokens for e = E.
  __device__ std::int64_t total(std::int64_t e) const {
    const std::int64_t column = e < num_experts ? e : 2 * num_experts;
    std::int64_t sum = 0;
#pragma unroll 8
    for (std::int64_t s = 0; s < num_sequences; ++s) sum += by_sequence[s * stride + column];
    return sum;
  }
};

LossSums sums_of(const RouterSums& sums) {
  return {elements<std::int64_t>(ConstTensorView(sums.by_sequence)), sums.by_sequence.row_stride(),
          sums.num_sequences(), sums.num_experts};
}

constexpr int kLossThreads = 128;

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>((threads + kLossThreads - 1) / kLossThreads);
}
__device__ std::int64_t thread_in_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__global__ void add_up_losses(const LossSums sums, std::int64_t* totals) {
  const std::int64_t i = thread_in_grid();
  if (i <= sums.num_experts) totals[i] = sums.total(i);
  if (i != sums.num_experts + 1) return;
  std::int64_t with_tokens = 0;
  for (std::int64_t s = 0; s < sums.num_sequences; ++s) with_tokens += sums.tokens(s) != 0 ? 1 : 0;
  totals[i] = with_tokens;
}

}  // namespace

void loss_totals(const LossTotals& args, Context& context) {
  const LossSums sums = sums_of(args.sums);
  add_up_losses<<<blocks_for(loss_total_words(sums.num_experts)), kLossThreads, 0,
                  context.stream()>>>(sums, elements<std::int64_t>(args.totals));
  check(cudaGetLastError(), "add_up_losses");
}

namespace {

struct Slopes {
  LossSums sums;
  const std::int64_t* totals = nullptr;  // [E + 2]
  std::int64_t top_k = 0;
  RouterLosses d_losses;
  bool is_by_sequence = false;
  float* by_score = nullptr;  // [S, E]
  std::int64_t by_score_stride = 0;
  float* by_square = nullptr;  // [1]

  // What E · Σ f_e · P_e has in front of picks · scores.
  __device__ double balance_factor(std::int64_t num_tokens) const {
    const auto tokens = static_cast<double>(num_tokens);
    return num_tokens == 0 ? 0.0
                           : static_cast<double>(sums.num_experts) /
                                 (tokens * tokens * static_cast<double>(top_k));
  }
};

// A row of blocks a sequence, as far as there are blocks.
__global__ void fill_slopes(const Slopes slopes) {
  const std::int64_t num_experts = slopes.sums.num_experts;
  const std::int64_t num_tokens = slopes.totals[num_experts];
  const std::int64_t e = thread_in_grid();
  if (e == 0 && blockIdx.y == 0 && slopes.by_square != nullptr) {
    const double z = slopes.d_losses.z;
    *slopes.by_square =
        num_tokens > 0 ? static_cast<float>(z / static_cast<double>(num_tokens)) : 0.0F;
  }
  if (slopes.by_score == nullptr || e >= num_experts) return;
  const double d_balance = slopes.d_losses.balance;
  const std::int64_t with_tokens = slopes.totals[num_experts + 1];
  const auto sequences = static_cast<double>(with_tokens > 1 ? with_tokens : 1);
  for (std::int64_t s = blockIdx.y; s < slopes.sums.num_sequences; s += gridDim.y) {
    const double factor = slopes.is_by_sequence
                              ? d_balance / sequences * slopes.balance_factor(slopes.sums.tokens(s))
                              : d_balance * slopes.balance_factor(num_tokens);
    const std::int64_t picks = slopes.is_by_sequence ? slopes.sums.picks(s, e) : slopes.totals[e];
    slopes.by_score[s * slopes.by_score_stride + e] =
        static_cast<float>(static_cast<double>(picks) * factor);
  }
}

}  // namespace

void loss_slopes(const LossSlopes& args, Context& context) {
  if (args.slopes.is_zero()) return;
  const auto& by_score = args.slopes.by_score;
  const auto& by_square = args.slopes.by_square;
  const Slopes slopes{.sums = sums_of(args.sums),
                      .totals = elements<std::int64_t>(args.totals),
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

__global__ void add_to_statistics(const LossSums sums, std::int64_t* statistics) {
  const std::int64_t i = thread_in_grid();
  if (i <= sums.num_experts) statistics[i] += sums.total(i);
}

// A warp an expert: the mean over those that share its owner, or over all.
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
      sums_of(sums), elements<std::int64_t>(statistics));
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
