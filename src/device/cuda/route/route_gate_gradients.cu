// Gradients of the gate and its bias. Partial sums over parts of the tokens are added up in order.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/given.h"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_split.cuh"
#include "device/cuda/route/route_views.cuh"

namespace switchyard::cuda {
namespace {

// The number and size of the parts depend only on the number of tokens.
struct Parts {
  unsigned count = 0;
  std::int64_t tokens = 0;  // per part, except the last

  explicit Parts(std::int64_t num_tokens) {
    if (num_tokens == 0) return;
    const auto most = std::clamp<std::int64_t>((num_tokens + 1023) / 1024, 1, 8);
    tokens = ((num_tokens + most - 1) / most + kSplitK - 1) / kSplitK * kSplitK;
    count = static_cast<unsigned>((num_tokens + tokens - 1) / tokens);
  }
};

// partials [parts, E, H]
struct StorePartial {
  float* partials;
  std::int64_t rows;
  std::int64_t columns;

  __device__ void operator()(std::int64_t row, std::int64_t column, float sum) const {
    partials[(blockIdx.z * rows + row) * columns + column] = sum;
  }
};

template <bool kAligned>
__global__ __launch_bounds__(kSplitThreads) void gate_partials_kernel(SplitProduct p,
                                                                      StorePartial store) {
  extern __shared__ __align__(128) std::byte shared[];
  const int first_m = static_cast<int>(blockIdx.x) * kSplitM;
  const int first_n = static_cast<int>(blockIdx.y) * kSplitN;
  SplitSums sums = {};
  split_product<true, kAligned>(p, shared, first_m, first_n, sums);
  for_each_pair(sums, [&](int row, int column, float first, float second) {
    const std::int64_t m = first_m + row;
    const std::int64_t n = first_n + column;
    if (m < store.rows && n < store.columns) store(m, n, first);
    if (m < store.rows && n + 1 < store.columns) store(m, n + 1, second);
  });
}

template <bool kAligned>
void launch_gate_partials(const SplitProduct& product, const Parts& parts,
                          const StorePartial& store, Context& context) {
  constexpr int kBytes = SplitTile<true>::kSharedBytes;
  check(cudaFuncSetAttribute(gate_partials_kernel<kAligned>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of gate_partials_kernel");
  const dim3 grid(static_cast<unsigned>((store.rows + kSplitM - 1) / kSplitM),
                  static_cast<unsigned>((store.columns + kSplitN - 1) / kSplitN), parts.count);
  gate_partials_kernel<kAligned><<<grid, kSplitThreads, kBytes, context.stream()>>>(product, store);
  check(cudaGetLastError(), "gate_partials_kernel");
}

constexpr int kBiasExperts = 32;
constexpr int kBiasRows = 8;

// Writes partials [parts, E]. Each block sums one part of the tokens for 32 experts.
__global__ __launch_bounds__(kBiasExperts* kBiasRows) void bias_partials_kernel(
    F32Matrix d_logits, std::int64_t part_tokens, float* partials) {
  __shared__ float rows[kBiasRows][kBiasExperts];
  const int lane = static_cast<int>(threadIdx.x) % kBiasExperts;
  const int row = static_cast<int>(threadIdx.x) / kBiasExperts;
  const int expert = static_cast<int>(blockIdx.x) * kBiasExperts + lane;
  const std::int64_t first = blockIdx.z * part_tokens;
  const std::int64_t last = min(first + part_tokens, d_logits.rows);
  float sum = 0.0F;
  if (expert < d_logits.columns) {
    for (std::int64_t t = first + row; t < last; t += kBiasRows) {
      sum += d_logits.data[t * d_logits.row_stride + expert];
    }
  }
  rows[row][lane] = sum;
  __syncthreads();
  if (row != 0 || expert >= d_logits.columns) return;
  for (int r = 1; r < kBiasRows; ++r) sum += rows[r][lane];
  partials[std::int64_t{blockIdx.z} * d_logits.columns + expert] = sum;
}

// gradient [rows, columns] (+)= the sum of the parts, in order.
template <typename T>
__global__ __launch_bounds__(256) void add_parts_kernel(StorePartial from, unsigned parts,
                                                        T* gradient, std::int64_t row_stride,
                                                        bool accumulates) {
  const std::int64_t elements = from.rows * from.columns;
  const std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= elements) return;
  float sum = 0.0F;
  for (unsigned p = 0; p < parts; ++p) sum += from.partials[p * elements + i];
  T& to = gradient[i / from.columns * row_stride + i % from.columns];
  to = gemm::rounded<T>(accumulates ? gemm::to_f32(to) + sum : sum);
}

void add_parts(const StorePartial& from, const Parts& parts, const TensorView& gradient,
               GradientMode mode, Context& context) {
  const auto blocks = static_cast<unsigned>((from.rows * from.columns + 255) / 256);
  if (blocks == 0) return;
  const bool accumulates = mode == GradientMode::accumulate;
  if (gradient.dtype() == Dtype::bf16) {
    add_parts_kernel<<<blocks, 256, 0, context.stream()>>>(
        from, parts.count, reinterpret_cast<__nv_bfloat16*>(gradient.data()), gradient.row_stride(),
        accumulates);
  } else {
    add_parts_kernel<<<blocks, 256, 0, context.stream()>>>(
        from, parts.count, reinterpret_cast<float*>(gradient.data()), gradient.row_stride(),
        accumulates);
  }
  check(cudaGetLastError(), "add_parts_kernel");
}

void gate_gradient(const GateGradients& args, const Parts& parts, Context& context) {
  const TensorView& gradient = args.gradients.gate;
  const auto rows = gradient.rows();
  const auto columns = gradient.shape()[1];
  const TensorView partials = context.take({parts.count, rows * columns}, Dtype::f32);
  const StorePartial store{reinterpret_cast<float*>(partials.data()), rows, columns};
  const auto* keeps = reinterpret_cast<const std::int32_t*>(args.has_part.data());
  if (parts.count > 0 && args.x.dtype() == Dtype::bf16) {
    const SplitProduct product{.a = f32_matrix(args.d_logits),
                               .b = bf16_matrix(args.x),
                               .k_part = parts.tokens,
                               .keeps = keeps};
    const auto launch =
        has_aligned_rows(args.x) ? launch_gate_partials<true> : launch_gate_partials<false>;
    launch(product, parts, store, context);
  } else if (parts.count > 0) {
    launch_simt_product(
        factor_of<float, Runs::across_k>(args.d_logits), factor_of<float, Runs::across_k>(args.x),
        {.m = rows, .n = columns, .k = args.x.rows(), .k_part = parts.tokens, .keeps = keeps},
        parts.count, store, context);
  }
  add_parts(store, parts, gradient, args.mode, context);
}

void bias_gradient(const GateGradients& args, const Parts& parts, Context& context) {
  const auto num_experts = args.gradients.gate_bias.rows();
  const TensorView partials = context.take({parts.count, num_experts}, Dtype::f32);
  const StorePartial store{reinterpret_cast<float*>(partials.data()), 1, num_experts};
  if (parts.count > 0) {
    const dim3 grid(static_cast<unsigned>((num_experts + kBiasExperts - 1) / kBiasExperts), 1,
                    parts.count);
    bias_partials_kernel<<<grid, kBiasExperts * kBiasRows, 0, context.stream()>>>(
        f32_matrix(args.d_logits), parts.tokens, store.partials);
    check(cudaGetLastError(), "bias_partials_kernel");
  }
  add_parts(store, parts, args.gradients.gate_bias, args.mode, context);
}

}  // namespace

void gate_gradients(const GateGradients& args, Context& context) {
  const Parts parts(args.x.rows());
  if (parts.count == 0 && args.mode == GradientMode::accumulate) return;
  gate_gradient(args, parts, context);
  if (is_given(args.gradients.gate_bias)) bias_gradient(args, parts, context);
}

}  // namespace switchyard::cuda
