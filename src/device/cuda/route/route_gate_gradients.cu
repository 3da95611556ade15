// SPDX-License-Identifier: Apache-2.0
// Gradients of the gate and its bias. Partial sums over parts of the tokens are added up in order.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/given.h"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_product.cuh"
#include "device/cuda/route/route_simt.cuh"

namespace switchyard::cuda {
namespace {

// Few experts need only half a tile.
using GateShape = ProductShape<128, 128, 2, Runs::across_k, Runs::across_k>;
using FewGateShape = ProductShape<64, 128, 2, Runs::across_k, Runs::across_k>;
constexpr std::int64_t kFewExperts = FewGateShape::kM;

// Splits the tokens into parts, each with sums of its own, so that there are enough blocks to fill
// a large GPU. The parts depend only on sizes, and so do the bits of a gradient.
struct Parts {
  unsigned count = 0;
  std::int64_t tokens = 0;  // per part, except the last

  Parts(std::int64_t num_tokens, const Shape& gate) {
    constexpr std::int64_t kBlocks = 256;
    constexpr std::int64_t kFewestTokens = 256;
    if (num_tokens == 0) return;
    const auto tiles =
        std::max<std::int64_t>(1, ((gate[0] + GateShape::kM - 1) / GateShape::kM) *
                                      ((gate[1] + GateShape::kN - 1) / GateShape::kN));
    const auto most = std::max<std::int64_t>(
        1, std::min(kBlocks / tiles, (num_tokens + kFewestTokens - 1) / kFewestTokens));
    constexpr std::int64_t kStep = GateShape::kDepth;
    tokens = ((num_tokens + most - 1) / most + kStep - 1) / kStep * kStep;
    count = static_cast<unsigned>((num_tokens + tokens - 1) / tokens);
  }
};

// The sums of the parts: [parts, rows, columns]. Rows have an even stride, so that pairs are
// aligned.
struct Partials {
  float* data;
  std::int64_t row_stride;
  std::int64_t rows;
  std::int64_t columns;

  __device__ float* at(unsigned part, std::int64_t row, std::int64_t column) const {
    return data + (part * rows + row) * row_stride + column;
  }
  __device__ void operator()(std::int64_t row, std::int64_t column, float sum) const {
    *at(blockIdx.z, row, column) = sum;
  }
  __device__ void pair(std::int64_t row, std::int64_t column, float2 sums, bool /*both*/) const {
    *reinterpret_cast<float2*>(at(blockIdx.z, row, column)) = sums;
  }
};

constexpr int kBiasExperts = 32;
constexpr int kBiasRows = 8;

// Each block sums one part of the tokens for 32 experts.
__global__ __launch_bounds__(kBiasExperts* kBiasRows) void bias_partials_kernel(
    Factor<float, Runs::across_k> d_logits, std::int64_t num_tokens, std::int64_t part_tokens,
    Partials partials) {
  __shared__ float rows[kBiasRows][kBiasExperts];
  const int lane = static_cast<int>(threadIdx.x) % kBiasExperts;
  const int row = static_cast<int>(threadIdx.x) / kBiasExperts;
  const int expert = static_cast<int>(blockIdx.x) * kBiasExperts + lane;
  const std::int64_t first = blockIdx.z * part_tokens;
  const std::int64_t last = min(first + part_tokens, num_tokens);
  float sum = 0.0F;
  if (expert < partials.columns) {
    for (std::int64_t t = first + row; t < last; t += kBiasRows) sum += *d_logits.at(expert, t);
  }
  rows[row][lane] = sum;
  __syncthreads();
  if (row != 0 || expert >= partials.columns) return;
  for (int r = 1; r < kBiasRows; ++r) sum += rows[r][lane];
  partials(0, expert, sum);
}

// gradient [rows, columns] (+)= the sum of the parts, in order.
template <typename T>
__global__ __launch_bounds__(256) void add_parts_kernel(Partials from, unsigned parts, T* gradient,
                                                        std::int64_t row_stride, bool accumulates) {
  const std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= from.rows * from.columns) return;
  const std::int64_t row = i / from.columns;
  const std::int64_t column = i % from.columns;
  float sum = 0.0F;
#pragma unroll 8
  for (unsigned p = 0; p < parts; ++p) sum += *from.at(p, row, column);
  T& to = gradient[row * row_stride + column];
  to = gemm::rounded<T>(accumulates ? gemm::to_f32(to) + sum : sum);
}

void add_parts(const Partials& from, const Parts& parts, const TensorView& gradient,
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

template <typename Shape>
void bf16_gate_partials(const GateGradients& args, const ProductSizes& sizes, unsigned parts,
                        const Partials& partials, Context& context) {
  const Product<Shape> product{.a = {factor_of<__nv_bfloat16, Runs::across_k>(args.d_logits.main),
                                     factor_of<__nv_bfloat16, Runs::across_k>(args.d_logits.rest)},
                               .b = factor_of<__nv_bfloat16, Runs::across_k>(args.x),
                               .sizes = sizes};
  launch_product(product, has_aligned_rows(args.x), parts,
                 StorePairs<Partials>{partials, sizes.m, sizes.n}, context);
}

void gate_partials(const GateGradients& args, const Parts& parts, const Partials& partials,
                   Context& context) {
  const ProductSizes sizes{.m = partials.rows,
                           .n = partials.columns,
                           .k = args.x.rows(),
                           .k_part = parts.tokens,
                           .keeps = reinterpret_cast<const std::int32_t*>(args.has_part.data())};
  if (args.x.dtype() == Dtype::bf16) {
    const auto launch =
        sizes.m <= kFewExperts ? bf16_gate_partials<FewGateShape> : bf16_gate_partials<GateShape>;
    return launch(args, sizes, parts.count, partials, context);
  }
  launch_simt_product(factor_of<float, Runs::across_k>(args.d_logits.values),
                      factor_of<float, Runs::across_k>(args.x), sizes, parts.count, partials,
                      context);
}

void bias_partials(const GateGradients& args, const Parts& parts, const Partials& partials,
                   Context& context) {
  const dim3 grid(static_cast<unsigned>((partials.columns + kBiasExperts - 1) / kBiasExperts), 1,
                  parts.count);
  bias_partials_kernel<<<grid, kBiasExperts * kBiasRows, 0, context.stream()>>>(
      factor_of<float, Runs::across_k>(args.d_logits.values), args.x.rows(), parts.tokens,
      partials);
  check(cudaGetLastError(), "bias_partials_kernel");
}

// Writes one gradient from partial sums that `write` launches. A vector counts as one row.
template <typename Write>
void add_gradient(const GateGradients& args, const Parts& parts, const TensorView& gradient,
                  Write write, Context& context) {
  const bool is_matrix = gradient.shape().rank() == 2;
  const auto rows = is_matrix ? gradient.rows() : 1;
  const auto columns = is_matrix ? gradient.shape()[1] : gradient.rows();
  const TensorView memory = context.take({parts.count * rows, (columns + 1) / 2 * 2}, Dtype::f32);
  const Partials partials{reinterpret_cast<float*>(memory.data()), memory.row_stride(), rows,
                          columns};
  if (parts.count > 0) write(args, parts, partials, context);
  add_parts(partials, parts, gradient, args.mode, context);
}

}  // namespace

void gate_gradients(const GateGradients& args, Context& context) {
  const Parts parts(args.x.rows(), args.gradients.gate.shape());
  if (parts.count == 0 && args.mode == GradientMode::accumulate) return;
  add_gradient(args, parts, args.gradients.gate, gate_partials, context);
  if (is_given(args.gradients.gate_bias)) {
    add_gradient(args, parts, args.gradients.gate_bias, bias_partials, context);
  }
}

}  // namespace switchyard::cuda
