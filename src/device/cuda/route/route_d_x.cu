// SPDX-License-Identifier: Apache-2.0
// The gradient that reaches the tokens through the gate: d_x += d_logits · gate.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/cuda/early_launch.cuh"
#include "device/cuda/hopper/aligned_copies.h"
#include "device/cuda/route/route_gate.h"
#include "device/cuda/route/route_product.cuh"
#include "device/cuda/route/route_simt.cuh"
#include "device/cuda/route/route_wgmma_d_x.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

using DxShape = ProductShape<128, 128, 2, Runs::along_k, Runs::across_k>;
constexpr int kDxTilesPerBlock = 4;

// Eight consecutive elements of a row, of which the first `count` are there.
struct Eight {
  __nv_bfloat16* at;
  int count;
  bool is_aligned;  // to 16 bytes

  __device__ uint4 load() const {
    if (is_aligned && count >= 8) return *reinterpret_cast<const uint4*>(at);
    return gemm::load_eight(at, count);
  }
  __device__ void store(uint4 words) const {
    if (is_aligned && count >= 8) {
      *reinterpret_cast<uint4*>(at) = words;
      return;
    }
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<unsigned short>(pairs[i / 2] >> i % 2 * 16);
      if (i < count) at[i] = __ushort_as_bfloat16(bits);
    }
  }
};

__device__ unsigned sum_of(unsigned known, float2 sums) {
  const float2 from = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&known));
  const __nv_bfloat162 to = __floats2bfloat162_rn(from.x + sums.x, from.y + sums.y);
  return *reinterpret_cast<const unsigned*>(&to);
}

// Transposes a 4 × 4 matrix of which lane q of each four lanes has row q.
__device__ void transpose_in_fours(float2 (&row)[4]) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool is_low = (lane & bit) == 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      float2& low = row[i];
      float2& high = row[i | bit];
      const float x = __shfl_xor_sync(kAllLanes, is_low ? high.x : low.x, bit);
      const float y = __shfl_xor_sync(kAllLanes, is_low ? high.y : low.y, bit);
      high = is_low ? make_float2(x, y) : high;
      low = is_low ? low : make_float2(x, y);
    }
  }
}

// An epilogue that adds the sums to bf16 rows. Each thread gathers eight consecutive sums, so that
// four lanes access 64 consecutive bytes.
struct AddToRows {
  __nv_bfloat16* data;
  std::int64_t row_stride;
  std::int64_t rows;
  std::int64_t columns;
  bool is_aligned;  // rows are aligned to 16 bytes

  // Fetches the tile into the L2 cache: two threads per row, one for every 128 bytes.
  __device__ void expect(std::int64_t first_m, std::int64_t first_n) const {
    static_assert(DxShape::kM * DxShape::kN == DxShape::kThreads * 64);
    const std::int64_t m = first_m + static_cast<int>(threadIdx.x) / 2;
    const std::int64_t n = first_n + static_cast<int>(threadIdx.x) % 2 * 64;
    if (m < rows && n < columns) {
      asm volatile("prefetch.global.L2 [%0];\n" ::"l"(data + m * row_stride + n));
    }
  }
  template <typename Shape>
  __device__ void take(const typename Shape::Sums& sums, std::int64_t first_m,
                       std::int64_t first_n) const {
    constexpr int kRuns = Shape::kWarpN / 32;
    uint4 known[4][kRuns];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        known[m][run] = eight<Shape>(first_m, first_n, m, run).load();
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        float2 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& four = sums[m / 2][run * 4 + i];
          pairs[i] = make_float2(four[m % 2 * 2], four[m % 2 * 2 + 1]);
        }
        transpose_in_fours(pairs);
        const uint4& from = known[m][run];
        eight<Shape>(first_m, first_n, m, run)
            .store(make_uint4(sum_of(from.x, pairs[0]), sum_of(from.y, pairs[1]),
                              sum_of(from.z, pairs[2]), sum_of(from.w, pairs[3])));
      }
    }
  }

 private:
  // This thread's eight elements in run `run` of the warp's rows m · 8 … m · 8 + 7.
  template <typename Shape>
  __device__ Eight eight(std::int64_t first_m, std::int64_t first_n, int m, int run) const {
    const int lane = lane_of_thread();
    const std::int64_t row = first_m + Shape::warp_row() + m * 8 + lane / 4;
    const std::int64_t column = first_n + Shape::warp_column() + run * 32 + lane % 4 * 8;
    const auto left = row < rows ? columns - column : 0;
    return {data + row * row_stride + column,
            static_cast<int>(max(std::int64_t{0}, min(left, std::int64_t{8}))), is_aligned};
  }
};

template <typename Shape>
void launch_wgmma_d_x(const hopper::gate::DxArgs& args, Context& context) {
  const int blocks = std::min(args.tiles, context.num_multiprocessors());
  launch_early(hopper::gate::d_x_kernel<Shape>,
               {.blocks = static_cast<unsigned>(blocks),
                .threads = hopper::gate::kDxThreads,
                .shared_bytes = Shape::kSharedBytes},
               args, "hopper::gate::d_x_kernel", context);
}

void wgmma_d_x(const DLogits& d_logits, const ConstTensorView& gate, const TensorView& d_x,
               Context& context) {
  const auto num_tokens = d_x.rows();
  const auto num_experts = gate.rows();
  const auto hidden = d_x.shape()[1];
  hopper::AlignedCopies copies(context);
  const Rows experts = copies.of(Rows{gate.data(), gate.row_stride()}, num_experts, hidden);
  hopper::AlignedResult result({d_x.data(), d_x.row_stride()}, num_tokens, hidden, context);
  const auto map_of = [](const Rows& rows, std::int64_t count, std::int64_t columns, int box) {
    return hopper::tensor_map(
        {.data = rows.data, .columns = columns, .rows = count, .row_stride = rows.stride}, box);
  };
  const Rows main{d_logits.main.data(), d_logits.main.row_stride()};
  const Rows rest{d_logits.rest.data(), d_logits.rest.row_stride()};
  hopper::gate::DxArgs args{
      .main = map_of(main, num_tokens, num_experts, hopper::gate::kDxTile),
      .rest = map_of(rest, num_tokens, num_experts, hopper::gate::kDxTile),
      .gate = map_of(experts, num_experts, hidden, hopper::kBlock),
      .d_x = map_of(result.rows(), num_tokens, hidden, hopper::gate::kDxTile),
      .k_blocks = hopper::gate::tiles_over(num_experts, hopper::kBlock),
      .column_tiles = hopper::gate::tiles_over(hidden, hopper::gate::kDxTile)};
  args.tiles = hopper::gate::tiles_over(num_tokens, hopper::gate::kDxTile) * args.column_tiles;
  if (args.k_blocks <= 2) {
    launch_wgmma_d_x<hopper::gate::DxShape<2, 4, 3>>(args, context);
  } else if (args.k_blocks <= 4) {
    launch_wgmma_d_x<hopper::gate::DxShape<4, 2, 2>>(args, context);
  } else {
    launch_wgmma_d_x<hopper::gate::DxShape<3, 4, 2>>(args, context);
  }
  result.finish();
}

void bf16_d_x(const DLogits& d_logits, const ConstTensorView& gate, const TensorView& d_x,
              Context& context) {
  const auto rows = d_x.rows();
  const auto columns = d_x.shape()[1];
  if (hopper::gate::fits(context, columns)) {
    return wgmma_d_x(d_logits, gate, d_x, context);
  }
  Product<DxShape> product{
      .a = {factor_of<__nv_bfloat16, Runs::along_k>(d_logits.main),
            factor_of<__nv_bfloat16, Runs::along_k>(d_logits.rest)},
      .b = factor_of<__nv_bfloat16, Runs::across_k>(gate),
      .sizes = {.m = rows, .n = columns, .k = gate.rows(), .k_part = gate.rows()}};
  const auto strips = (columns - 1) / (kDxTilesPerBlock * DxShape::kN) + 1;
  const auto blocks = (rows + DxShape::kM - 1) / DxShape::kM * strips;
  if (blocks >= context.num_multiprocessors()) product.tiles_per_block = kDxTilesPerBlock;
  launch_product(product, has_aligned_rows(gate), 1,
                 AddToRows{reinterpret_cast<__nv_bfloat16*>(d_x.data()), d_x.row_stride(), rows,
                           columns, has_aligned_rows(d_x)},
                 context);
}

template <typename T>
struct AddTo {
  T* data;
  std::int64_t row_stride;

  __device__ void operator()(std::int64_t row, std::int64_t column, float sum) const {
    gemm::put(data[row * row_stride + column], sum, true);
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

void add_gate_d_x(const DLogits& d_logits, const ConstTensorView& gate, const TensorView& d_x,
                  Context& context) {
  const bool gate_is_bf16 = gate.dtype() == Dtype::bf16;
  const bool x_is_bf16 = d_x.dtype() == Dtype::bf16;
  if (gate_is_bf16 && x_is_bf16) {
    bf16_d_x(d_logits, gate, d_x, context);
  } else if (gate_is_bf16) {
    f32_d_x<__nv_bfloat16, float>(d_logits.values, gate, d_x, context);
  } else if (x_is_bf16) {
    f32_d_x<float, __nv_bfloat16>(d_logits.values, gate, d_x, context);
  } else {
    f32_d_x<float, float>(d_logits.values, gate, d_x, context);
  }
}

}  // namespace switchyard::cuda
