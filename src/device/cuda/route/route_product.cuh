// SPDX-License-Identifier: Apache-2.0
// The gate's products of bf16 operands on tensor cores, from sm_80 on. Each block multiplies tiles
// from a ring of pipeline stages. The bits of a sum do not depend on the shape of the tiles.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "device/cuda/portable/gemm_bf16.cuh"
#include "device/cuda/route/route_operands.cuh"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

// The tile of a product and the layout of its operands. With two terms, `a` is the sum of two bf16
// matrices.
template <int kMOf, int kNOf, int kTermsOf, Runs kARunsOf, Runs kBRunsOf, int kStagesOf = 4,
          int kThreadsOf = 256>
struct ProductShape {
  static constexpr int kM = kMOf;
  static constexpr int kN = kNOf;
  static constexpr int kTerms = kTermsOf;
  static constexpr int kDepth = 64 / kTerms;
  static constexpr int kPart = 32 / kTerms;  // length of the partial sums that tensor cores make
  static constexpr int kStages = kStagesOf;
  static constexpr int kThreads = kThreadsOf;
  static constexpr Runs kARuns = kARunsOf;
  static constexpr Runs kBRuns = kBRunsOf;
  static constexpr bool kAKMajor = kARuns == Runs::along_k;
  static constexpr bool kBKMajor = kBRuns == Runs::along_k;
  using StageA = gemm::OperandStage<kAKMajor, kM, kDepth, kThreads>;
  using StageB = gemm::OperandStage<kBKMajor, kN, kDepth, kThreads>;
  static constexpr int kABytes = kTerms * StageA::kBytes;
  static constexpr int kSharedBytes = kStages * (kABytes + StageB::kBytes);
  static constexpr int kBlocks = kSharedBytes <= 112 * 1024 ? 2 : 1;  // per multiprocessor

  // Each warp has 32 rows of the tile by kWarpN columns.
  static constexpr int kWarpN = kM * kN / kThreads;
  using Sums = float[2][kWarpN / 8][4];
  static __device__ int warp_row() {
    return static_cast<int>(threadIdx.x) / 32 / (kN / kWarpN) * 32;
  }
  static __device__ int warp_column() {
    return static_cast<int>(threadIdx.x) / 32 % (kN / kWarpN) * kWarpN;
  }
};

template <typename Shape>
struct Product {
  Factor<__nv_bfloat16, Shape::kARuns> a[Shape::kTerms];  // with the same row stride
  Factor<__nv_bfloat16, Shape::kBRuns> b;
  ProductSizes sizes;
  int tiles_per_block = 1;  // along n; they share the tile of `a`
};

// Computes this block's tiles. `epilogue` has two functions: expect(first_m, first_n) is called
// before a tile is multiplied, and take<Shape>(sums, first_m, first_n) after.
template <typename Shape, bool kAligned>
class ProductBlock {
 public:
  __device__ ProductBlock(const Product<Shape>& product, std::byte* shared)
      : p_(product), ring_(shared_address(shared)) {
    const auto n_tiles = static_cast<unsigned>((p_.sizes.n + Shape::kN - 1) / Shape::kN);
    const auto per_block = static_cast<unsigned>(p_.tiles_per_block);
    const unsigned strips = (n_tiles + per_block - 1) / per_block;
    m_tile_ = blockIdx.x / strips;
    first_tile_ = blockIdx.x % strips * per_block;
    num_tiles_ = min(per_block, n_tiles - first_tile_);
    const std::int64_t first_k = blockIdx.z * p_.sizes.k_part;
    num_k_ = static_cast<int>(min(p_.sizes.k_part, p_.sizes.k - first_k));
    a_ = p_.a[0].at(first_m(), first_k);
    b_ = p_.b.at(first_n(0), first_k);
    if (p_.sizes.keeps != nullptr) keeps_ = p_.sizes.keeps + first_k;
    read_keeps();
  }

  template <typename Epilogue>
  __device__ void run(const Epilogue& epilogue) {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) fetch(i);
    int stage = 0;
#pragma unroll 1
    for (unsigned tile = 0; tile < num_tiles_; ++tile) {
      epilogue.expect(first_m(), first_n(tile));
      typename Shape::Sums sums = {};
#pragma unroll 1
      for (int k = 0; k < num_k_; k += Shape::kDepth) {
        wait_for_copies<Shape::kStages - 2>();
        __syncthreads();
        fetch(stage == 0 ? Shape::kStages - 1 : stage - 1);  // all threads have finished with it
        multiply(a_stage(stage, k), b_stage(stage), sums);
        stage = stage == Shape::kStages - 1 ? 0 : stage + 1;
      }
      // Makes m_tile_ opaque: what the epilogue computes from it would otherwise move out of the
      // loop, and take registers from the products.
      asm volatile("" : "+r"(m_tile_));
      epilogue.template take<Shape>(sums, first_m(), first_n(tile));
    }
  }

 private:
  using StageA = typename Shape::StageA;
  using StageB = typename Shape::StageB;

  __device__ std::int64_t first_m() const { return std::int64_t{m_tile_} * Shape::kM; }
  __device__ std::int64_t first_n(unsigned tile) const {
    return std::int64_t{first_tile_ + tile} * Shape::kN;
  }
  // If the ring holds all of k, the tile of `a` is loaded only once.
  __device__ bool keeps_a() const { return num_k_ <= Shape::kStages * Shape::kDepth; }
  __device__ unsigned a_stage(int stage, int k) const {
    return ring_ + (keeps_a() ? k / Shape::kDepth : stage) * Shape::kABytes;
  }
  __device__ unsigned b_stage(int stage) const {
    return ring_ + Shape::kStages * Shape::kABytes + stage * StageB::kBytes;
  }

  // Starts to load the next step into a stage. Past the last step, commits an empty group, so that
  // the wait count is always the same.
  __device__ void fetch(int stage) {
    if (next_tile_ < num_tiles_) {
      if (next_tile_ == 0 || !keeps_a()) fetch_a(a_stage(stage, next_k_));
      const auto n_left = p_.sizes.n - first_n(next_tile_);
      const auto columns = static_cast<int>(min(n_left, std::int64_t{Shape::kN}));
      const Factor<__nv_bfloat16, Shape::kBRuns> b{b_, p_.b.row_stride};
      StageB::template fill<kAligned>(b_stage(stage), b.at(next_tile_ * Shape::kN, next_k_),
                                      b.row_stride, {columns, num_k_ - next_k_, kept()});
      next_k_ += Shape::kDepth;
      if (next_k_ >= num_k_) {
        next_k_ = 0;
        ++next_tile_;
      }
      read_keeps();
    }
    commit_copies();
  }
  __device__ void fetch_a(unsigned stage) {
    const auto rows = static_cast<int>(min(p_.sizes.m - first_m(), std::int64_t{Shape::kM}));
    const Factor<__nv_bfloat16, Shape::kARuns> a{a_, p_.a[0].row_stride};
#pragma unroll
    for (int term = 0; term < Shape::kTerms; ++term) {
      const auto* from = a.at(0, next_k_) + (p_.a[term].data - p_.a[0].data);
      StageA::template fill<kAligned>(stage + term * StageA::kBytes, from, a.row_stride,
                                      {rows, num_k_ - next_k_});
    }
  }

  // One bit for each row of `b` that this thread copies.
  __device__ unsigned kept() const {
    if (Shape::kBKMajor || p_.sizes.keeps == nullptr) return ~0U;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < StageB::kCopies; ++i) bits |= next_keeps_[i] != 0 ? 1U << i : 0U;
    return bits;
  }
  // Reads which rows of `b` the next fetch() keeps, a step early to hide the latency.
  __device__ void read_keeps() {
    if constexpr (!Shape::kBKMajor) {
      if (p_.sizes.keeps == nullptr) return;
#pragma unroll
      for (int i = 0; i < StageB::kCopies; ++i) {
        const int k =
            next_k_ + static_cast<int>(threadIdx.x) / StageB::kChunks + i * StageB::kLinesAtOnce;
        next_keeps_[i] = k < num_k_ ? keeps_[k] : 0;
      }
    }
  }

  static __device__ void multiply(unsigned a_stage, unsigned b_stage, typename Shape::Sums& sums) {
#pragma unroll
    for (int k = 0; k < Shape::kDepth; k += Shape::kPart) add_part(a_stage, b_stage, k, sums);
  }
  // Tensor cores truncate their sums instead of rounding. Adding short partial sums here keeps that
  // error small.
  static __device__ void add_part(unsigned a_stage, unsigned b_stage, int first_k,
                                  typename Shape::Sums& sums) {
    std::uint32_t a[2][2][4];  // by step of 16 in k or by term, then by 16 rows
    const auto k_of = [&](int step) { return first_k + (Shape::kTerms == 1 ? step * 16 : 0); };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int term = Shape::kTerms == 1 ? 0 : i / 2;
      StageA::load_a(a[i / 2][i % 2], a_stage + term * StageA::kBytes,
                     Shape::warp_row() + i % 2 * 16, k_of(i / 2));
    }
#pragma unroll
    for (int n = 0; n < Shape::kWarpN / 16; ++n) {
      float part[2][2][4] = {};
      std::uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == 0 || (i == 2 && Shape::kTerms == 1)) {
          StageB::load_b(b, b_stage, Shape::warp_column() + n * 16, k_of(i / 2));
        }
        gemm::multiply_add(part[i % 2][0], a[i / 2][i % 2], b[0], b[1]);
        gemm::multiply_add(part[i % 2][1], a[i / 2][i % 2], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        sums[i / 8][2 * n + i / 4 % 2][i % 4] += part[i / 8][i / 4 % 2][i % 4];
      }
    }
  }

  const Product<Shape>& p_;
  unsigned ring_;  // the stages of `a`, followed by those of `b`
  unsigned m_tile_;
  unsigned first_tile_;  // along n
  unsigned num_tiles_;
  int num_k_;               // of this part
  const __nv_bfloat16* a_;  // the first element of the block's part of the first term
  const __nv_bfloat16* b_;
  const std::int32_t* keeps_ = nullptr;
  // The next step to load:
  unsigned next_tile_ = 0;
  int next_k_ = 0;
  std::int32_t next_keeps_[StageB::kCopies] = {};
};

template <typename Shape, bool kAligned, typename Epilogue>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void product_kernel(
    const __grid_constant__ Product<Shape> product, const Epilogue epilogue) {
  extern __shared__ __align__(128) std::byte product_stages[];
  ProductBlock<Shape, kAligned>(product, product_stages).run(epilogue);
}

// Splits k into `parts`, each a sum of its own. `is_aligned`: the rows of all operands are.
template <typename Shape, typename Epilogue>
void launch_product(const Product<Shape>& product, bool is_aligned, unsigned parts,
                    const Epilogue& epilogue, Context& context) {
  const auto& sizes = product.sizes;
  const std::int64_t n_per_block = std::int64_t{product.tiles_per_block} * Shape::kN;
  const auto blocks =
      (sizes.m + Shape::kM - 1) / Shape::kM * ((sizes.n + n_per_block - 1) / n_per_block);
  if (blocks == 0) return;
  const auto kernel =
      is_aligned ? product_kernel<Shape, true, Epilogue> : product_kernel<Shape, false, Epilogue>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             Shape::kSharedBytes),
        "shared memory of product_kernel");
  const dim3 grid(static_cast<unsigned>(blocks), 1, parts);
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, context.stream()>>>(product, epilogue);
  check(cudaGetLastError(), "product_kernel");
}

// Calls visit(row, column, sums at this and the next column) for every pair of the tile.
template <typename Shape, typename Visit>
__device__ inline void for_each_pair(const typename Shape::Sums& sums, Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = 0; n < Shape::kWarpN / 8; ++n) {
      const auto& four = sums[m / 2][n];
      visit(Shape::warp_row() + m * 8 + lane / 4, Shape::warp_column() + n * 8 + lane % 4 * 2,
            make_float2(four[m % 2 * 2], four[m % 2 * 2 + 1]));
    }
  }
}

// An epilogue that calls store.pair(row, column, two sums, whether the second column exists).
template <typename Store>
struct StorePairs {
  Store store;
  std::int64_t rows;
  std::int64_t columns;

  __device__ void expect(std::int64_t /*first_m*/, std::int64_t /*first_n*/) const {}
  template <typename Shape>
  __device__ void take(const typename Shape::Sums& sums, std::int64_t first_m,
                       std::int64_t first_n) const {
    for_each_pair<Shape>(sums, [&](int row, int column, float2 pair) {
      const std::int64_t m = first_m + row;
      const std::int64_t n = first_n + column;
      if (m < rows && n < columns) store.pair(m, n, pair, n + 1 < columns);
    });
  }
};

}  // namespace switchyard::cuda
