// SPDX-License-Identifier: Apache-2.0
// Gradients of the gate and its bias. Partial sums over parts of the tokens are added up in order.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/given.h"
#include "device/cuda/early_launch.cuh"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_product.cuh"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_wgmma_gate.cuh"

namespace switchyard::cuda {
namespace {

// Few experts need only half a tile.
using GateShape = ProductShape<128, 128, 2, Runs::across_k, Runs::across_k>;
using FewGateShape = ProductShape<64, 128, 2, Runs::across_k, Runs::across_k>;
constexpr std::int64_t kFewExperts = FewGateShape::kM;

bool fits_wgmma(const GateGradients& args, const Context& context) {
  return args.x.dtype() == Dtype::bf16 && hopper::gate::fits(context, args.x.shape()[1]);
}

// Splits the tokens into parts, each with sums of its own, so that there are enough blocks to fill
// a large GPU. With given kernels, the parts depend only on sizes, and so do the bits of a
// gradient.
struct Parts {
  unsigned count = 0;
  std::int64_t tokens = 0;  // per part, except the last

  Parts(const GateGradients& args, const Context& context) {
    constexpr std::int64_t kFewestTokens = 256;
    const auto num_tokens = args.x.rows();
    const auto& gate = args.gradients.gate.shape();
    if (num_tokens == 0) return;
    const bool is_wgmma = fits_wgmma(args, context);
    const std::int64_t rows = is_wgmma && gate[0] <= kFewExperts ? 64 : 128;
    const std::int64_t columns = 128 * 128 / rows;
    const auto tiles = std::max<std::int64_t>(
        1, (gate[0] + rows - 1) / rows * ((gate[1] + columns - 1) / columns));
    // A wgmma block fills a multiprocessor, so 128 blocks run in one wave on Hopper.
    const std::int64_t blocks = is_wgmma && 128 % tiles == 0 ? 128 : 256;
    const auto most = std::max<std::int64_t>(
        1, std::min(blocks / tiles, (num_tokens + kFewestTokens - 1) / kFewestTokens));
    constexpr std::int64_t kStep = 64;
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

template <typename T>
struct AddParts {
  Partials from;
  unsigned parts;
  T* gradient;  // [rows, columns]
  std::int64_t row_stride;
  bool accumulates;
};
constexpr int kAddThreads = 256;

// gradient (+)= the sum of the parts, in order. A row takes a whole number of blocks.
template <typename T>
__global__ __launch_bounds__(kAddThreads) void add_parts_kernel(AddParts<T> p) {
  start_in_turn();
  const auto row_blocks = static_cast<unsigned>((p.from.columns + kAddThreads - 1) / kAddThreads);
  const std::int64_t row = blockIdx.x / row_blocks;
  const std::int64_t column = blockIdx.x % row_blocks * kAddThreads + threadIdx.x;
  if (column >= p.from.columns) return;
  float sum = 0.0F;
#pragma unroll 8
  for (unsigned part = 0; part < p.parts; ++part) sum += *p.from.at(part, row, column);
  gemm::put(p.gradient[row * p.row_stride + column], sum, p.accumulates);
}

template <typename T>
void launch_add_parts(const Partials& from, const Parts& parts, const TensorView& gradient,
                      GradientMode mode, Context& context) {
  const auto blocks = from.rows * ((from.columns + kAddThreads - 1) / kAddThreads);
  if (blocks == 0) return;
  const AddParts<T> args{from, parts.count, reinterpret_cast<T*>(gradient.data()),
                         gradient.row_stride(), mode == GradientMode::accumulate};
  launch_early(add_parts_kernel<T>, {static_cast<unsigned>(blocks), kAddThreads}, args,
               "add_parts_kernel", context);
}

void add_parts(const Partials& from, const Parts& parts, const TensorView& gradient,
               GradientMode mode, Context& context) {
  const auto launch =
      gradient.dtype() == Dtype::bf16 ? launch_add_parts<__nv_bfloat16> : launch_add_parts<float>;
  launch(from, parts, gradient, mode, context);
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

void wgmma_gate_partials(const GateGradients& args, const Parts& parts, const Partials& partials,
                         Context& context) {
  hopper::AlignedCopies copies(context);
  const auto num_tokens = args.x.rows();
  const auto x = copies.of(Rows{args.x.data(), args.x.row_stride()}, num_tokens, partials.columns);
  const hopper::gate::GradientSizes sizes{.num_tokens = static_cast<int>(num_tokens),
                                          .part_tokens = static_cast<int>(parts.tokens),
                                          .num_experts = static_cast<int>(partials.rows),
                                          .columns = static_cast<int>(partials.columns)};
  using hopper::gate::GradientShape;
  const auto launch = partials.rows <= kFewExperts
                          ? hopper::gate::launch_gradient<GradientShape<64>, Partials>
                          : hopper::gate::launch_gradient<GradientShape<128>, Partials>;
  launch(args.d_logits, x, reinterpret_cast<const std::int32_t*>(args.has_part.data()), sizes,
         partials, context);
}

void gate_partials(const GateGradients& args, const Parts& parts, const Partials& partials,
                   Context& context) {
  if (fits_wgmma(args, context)) return wgmma_gate_partials(args, parts, partials, context);
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
  const Parts parts(args, context);
  if (parts.count == 0 && args.mode == GradientMode::accumulate) return;
  add_gradient(args, parts, args.gradients.gate, gate_partials, context);
  if (is_given(args.gradients.gate_bias)) {
    add_gradient(args, parts, args.gradients.gate_bias, bias_partials, context);
  }
}

}  // namespace switchyard::cuda
