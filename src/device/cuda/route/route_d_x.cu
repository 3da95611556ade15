// The gradient that reaches the tokens through the gate: d_x += d_logits · gate.
#include <cuda_runtime.h>

#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_split.cuh"
#include "device/cuda/route/route_views.cuh"

namespace switchyard::cuda {
namespace {

struct Bf16Rows {
  __nv_bfloat16* data;
  std::int64_t row_stride;
  bool is_aligned;  // rows are aligned to 16 bytes
};

// Adds `count` ≤ 8 consecutive sums.
__device__ void add_eight(__nv_bfloat16* to, const float* sums, int count, bool is_aligned) {
  if (!is_aligned || count < 8) {
    for (int i = 0; i < count; ++i) to[i] = __float2bfloat16_rn(__bfloat162float(to[i]) + sums[i]);
    return;
  }
  uint4 words = *reinterpret_cast<const uint4*>(to);
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 known = __bfloat1622float2(pairs[i]);
    pairs[i] = __floats2bfloat162_rn(known.x + sums[2 * i], known.y + sums[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(to) = words;
}

// The sums go through shared memory, so that d_x is read and written in coalesced accesses.
template <bool kAligned>
__global__ __launch_bounds__(kSplitThreads) void d_x_kernel(SplitProduct p, Bf16Rows d_x) {
  extern __shared__ __align__(128) std::byte shared[];
  constexpr int kPitch = kSplitN + 4;
  static_assert(kSplitM * kPitch * 4 <= SplitTile<false>::kSharedBytes);
  const int tiles = (p.b.columns + kSplitN - 1) / kSplitN;
  const int first_n = static_cast<int>(blockIdx.x % tiles) * kSplitN;
  const std::int64_t first_token = std::int64_t{blockIdx.x / tiles} * kSplitM;
  SplitSums sums = {};
  split_product<false, kAligned>(p, shared, first_token, first_n, sums);
  auto* rows = reinterpret_cast<float*>(shared);
  for_each_pair(sums, [&](int row, int column, float first, float second) {
    *reinterpret_cast<float2*>(rows + row * kPitch + column) = make_float2(first, second);
  });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kSplitM * kSplitN / 8; i += kSplitThreads) {
    const int row = i / (kSplitN / 8);
    const int column = i % (kSplitN / 8) * 8;
    const int count = min(8, p.b.columns - first_n - column);
    if (first_token + row >= p.a.rows || count <= 0) continue;
    add_eight(d_x.data + (first_token + row) * d_x.row_stride + first_n + column,
              rows + row * kPitch + column, count, d_x.is_aligned);
  }
}

template <bool kAligned>
void launch_d_x(const SplitProduct& product, const Bf16Rows& d_x, Context& context) {
  constexpr int kBytes = SplitTile<false>::kSharedBytes;
  check(cudaFuncSetAttribute(d_x_kernel<kAligned>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes),
        "shared memory of d_x_kernel");
  const std::int64_t tiles = (product.b.columns + kSplitN - 1) / kSplitN;
  const auto blocks = static_cast<unsigned>((product.a.rows + kSplitM - 1) / kSplitM * tiles);
  if (blocks == 0) return;
  d_x_kernel<kAligned><<<blocks, kSplitThreads, kBytes, context.stream()>>>(product, d_x);
  check(cudaGetLastError(), "d_x_kernel");
}

template <typename T>
struct AddTo {
  T* data;
  std::int64_t row_stride;

  __device__ void operator()(std::int64_t row, std::int64_t column, float sum) const {
    T& to = data[row * row_stride + column];
    to = gemm::rounded<T>(gemm::to_f32(to) + sum);
  }
};

template <typename G, typename X>
void f32_d_x(const ConstTensorView& d_logits, const ConstTensorView& gate, const TensorView& d_x,
             Context& context) {
  launch_simt_product(
      factor_of<float, Runs::along_k>(d_logits), factor_of<G, Runs::across_k>(gate),
      {.m = d_x.rows(), .n = d_x.shape()[1], .k = gate.rows(), .k_part = gate.rows()}, 1,
      AddTo<X>{reinterpret_cast<X*>(d_x.data()), d_x.row_stride()}, context);
}

}  // namespace

void add_gate_d_x(const ConstTensorView& d_logits, const ConstTensorView& gate,
                  const TensorView& d_x, Context& context) {
  const bool gate_is_bf16 = gate.dtype() == Dtype::bf16;
  const bool x_is_bf16 = d_x.dtype() == Dtype::bf16;
  if (gate_is_bf16 && x_is_bf16) {
    const SplitProduct product{
        .a = f32_matrix(d_logits), .b = bf16_matrix(gate), .k_part = gate.rows()};
    const auto launch = has_aligned_rows(gate) ? launch_d_x<true> : launch_d_x<false>;
    launch(product,
           {reinterpret_cast<__nv_bfloat16*>(d_x.data()), d_x.row_stride(), has_aligned_rows(d_x)},
           context);
  } else if (gate_is_bf16) {
    f32_d_x<__nv_bfloat16, float>(d_logits, gate, d_x, context);
  } else if (x_is_bf16) {
    f32_d_x<float, __nv_bfloat16>(d_logits, gate, d_x, context);
  } else {
    f32_d_x<float, float>(d_logits, gate, d_x, context);
  }
}

}  // namespace switchyard::cuda
