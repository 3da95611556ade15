// The gate's logits: bf16 on tensor cores, everything else in plain f32.
#include <cuda_runtime.h>

#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_tile.cuh"
#include "device/cuda/route/route_views.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kTokens = 64;
constexpr int kDepth = 64;
constexpr int kStages = 4;
constexpr int kLogitThreads = 128;

// Adds the bias, if any, to a sum and stores the logit.
struct StoreLogit {
  float* logits;
  std::int64_t row_stride;
  const void* bias;  // [E] or null
  bool bias_is_bf16;

  __device__ void operator()(std::int64_t token, std::int64_t expert, float sum) const {
    if (bias != nullptr) {
      sum += bias_is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(bias)[expert])
                          : static_cast<const float*>(bias)[expert];
    }
    logits[token * row_stride + expert] = sum;
  }
};

template <int kExperts>
constexpr int kStageBytes = (kTokens + kExperts) * kDepth * 2;

// Each warp accumulates 32 tokens by kExperts / 2 experts; the four warps form a 2 × 2 grid.
template <int kExperts>
__device__ void multiply_stage(const std::byte* stage, float (&sums)[2][kExperts / 16][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned x = shared_address(stage);
  const unsigned gate = x + kTokens * kDepth * 2;
  const int token = warp / 2 * 32 + lane % 16;
  const int expert = warp % 2 * (kExperts / 2) + lane % 8 + lane / 16 * 8;
  constexpr int kSteps = kDepth / 16;
  unsigned a[kSteps][2][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      gemm::load_matrices<false>(a[k][m],
                                 x + octet_offset<kDepth>(token + 16 * m, 2 * k + lane / 16));
    }
  }
#pragma unroll
  for (int n = 0; n < kExperts / 32; ++n) {
    float part[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned b[4];
      gemm::load_matrices<false>(
          b, gate + octet_offset<kDepth>(expert + 16 * n, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        gemm::multiply_add(part[m][0], a[k][m], b[0], b[1]);
        gemm::multiply_add(part[m][1], a[k][m], b[2], b[3]);
      }
    }
    add_part(part, sums, n);
  }
}

template <int kExperts>
__device__ void store_tile(const float (&sums)[2][kExperts / 16][4], std::int64_t first_token,
                           std::int64_t num_tokens, int first_expert, int num_experts,
                           const StoreLogit& store) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kExperts / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t token = first_token + warp / 2 * 32 + m * 16 + i / 2 * 8 + lane / 4;
        const int expert = first_expert + warp % 2 * (kExperts / 2) + n * 8 + lane % 4 * 2 + i % 2;
        if (token < num_tokens && expert < num_experts) store(token, expert, sums[m][n][i]);
      }
    }
  }
}

template <int kExperts, bool kAligned>
__global__ __launch_bounds__(kLogitThreads) void logits_kernel(Bf16Matrix x, Bf16Matrix gate,
                                                               StoreLogit store) {
  extern __shared__ __align__(128) std::byte shared[];
  const auto num_experts = static_cast<int>(gate.rows);
  const int tiles = (num_experts + kExperts - 1) / kExperts;
  const int first_expert = static_cast<int>(blockIdx.x % tiles) * kExperts;
  const std::int64_t first_token = std::int64_t{blockIdx.x / tiles} * kTokens;
  const int steps = (x.columns + kDepth - 1) / kDepth;
  float sums[2][kExperts / 16][4] = {};
  const auto load = [&](int step) {
    if (step < steps) {
      std::byte* stage = shared + step % kStages * kStageBytes<kExperts>;
      stage_tile<kTokens, kDepth, kLogitThreads, kAligned>(stage, x, first_token, step * kDepth);
      stage_tile<kExperts, kDepth, kLogitThreads, kAligned>(stage + kTokens * kDepth * 2, gate,
                                                            first_expert, step * kDepth);
    }
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);  // into the stage that all threads have just finished with
    multiply_stage<kExperts>(shared + step % kStages * kStageBytes<kExperts>, sums);
  }
  store_tile<kExperts>(sums, first_token, x.rows, first_expert, num_experts, store);
}

template <int kExperts, bool kAligned>
void launch_logits(const Bf16Matrix& x, const Bf16Matrix& gate, const StoreLogit& store,
                   Context& context) {
  constexpr int kBytes = kStages * kStageBytes<kExperts>;
  const auto kernel = logits_kernel<kExperts, kAligned>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of logits_kernel");
  const std::int64_t tiles = (gate.rows + kExperts - 1) / kExperts;
  const auto blocks = static_cast<unsigned>((x.rows + kTokens - 1) / kTokens * tiles);
  kernel<<<blocks, kLogitThreads, kBytes, context.stream()>>>(x, gate, store);
  check(cudaGetLastError(), "logits_kernel");
}

void bf16_logits(const ConstTensorView& x, const ConstTensorView& gate, const StoreLogit& store,
                 Context& context) {
  const bool is_small = gate.rows() <= 64;
  const bool aligned = has_aligned_rows(x) && has_aligned_rows(gate);
  const auto launch = is_small ? (aligned ? launch_logits<64, true> : launch_logits<64, false>)
                               : (aligned ? launch_logits<128, true> : launch_logits<128, false>);
  launch(bf16_matrix(x), bf16_matrix(gate), store, context);
}

template <typename X, typename G>
void f32_logits(const ConstTensorView& x, const ConstTensorView& gate, const StoreLogit& store,
                Context& context) {
  const auto hidden = x.shape()[1];
  launch_simt_product(factor_of<X, Runs::along_k>(x), factor_of<G, Runs::along_k>(gate),
                      {.m = x.rows(), .n = gate.rows(), .k = hidden, .k_part = hidden}, 1, store,
                      context);
}

}  // namespace

TensorView take_logits(std::int64_t num_tokens, std::int64_t num_experts, Context& context) {
  const auto stride = (num_experts + 3) / 4 * 4;
  const TensorView all = context.take({num_tokens, stride}, Dtype::f32);
  return {all.data(), Dtype::f32, {num_tokens, num_experts}, stride, all.owner(), all.memory()};
}

void gate_logits(const ConstTensorView& x, const RouterWeights& weights, const TensorView& logits,
                 Context& context) {
  const StoreLogit store{reinterpret_cast<float*>(logits.data()), logits.row_stride(),
                         weights.gate_bias.data(), weights.gate_bias.dtype() == Dtype::bf16};
  const bool x_is_bf16 = x.dtype() == Dtype::bf16;
  const bool gate_is_bf16 = weights.gate.dtype() == Dtype::bf16;
  if (x_is_bf16 && gate_is_bf16) {
    bf16_logits(x, weights.gate, store, context);
  } else if (x_is_bf16) {
    f32_logits<__nv_bfloat16, float>(x, weights.gate, store, context);
  } else if (gate_is_bf16) {
    f32_logits<float, __nv_bfloat16>(x, weights.gate, store, context);
  } else {
    f32_logits<float, float>(x, weights.gate, store, context);
  }
}

}  // namespace switchyard::cuda
