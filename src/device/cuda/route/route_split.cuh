// Products of f32 and bf16 matrices on tensor cores. Each f32 element is split into the sum of two
// bf16 terms, which leaves a relative error of 2⁻¹⁷.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/cuda/route/route_tile.cuh"

namespace switchyard::cuda {

constexpr int kSplitM = 64;
constexpr int kSplitN = 128;
constexpr int kSplitK = 32;
constexpr int kSplitStages = 3;
constexpr int kSplitThreads = 128;

// The f32 factor [rows, columns], with rows aligned to 16 bytes. Rows are m and columns k; if
// transposed, rows are k and columns m.
struct F32Matrix {
  const float* data;
  std::int64_t row_stride;
  std::int64_t rows;
  int columns;
};

struct SplitProduct {
  F32Matrix a;
  Bf16Matrix b;                         // [k, n]
  std::int64_t k_part = 0;              // block z takes part z of k, of this size
  const std::int32_t* keeps = nullptr;  // [k] or null: b counts as 0 where this is 0
};

// The tile of the f32 factor in shared memory. Its pitch avoids bank conflicts within a warp.
template <bool kTransposed>
struct SplitTile {
  static constexpr int kRows = kTransposed ? kSplitK : kSplitM;
  static constexpr int kColumns = kTransposed ? kSplitM : kSplitK;
  static constexpr int kPitch = kTransposed ? kSplitM + 4 : kSplitK + 8;
  static constexpr int kBytes = kRows * kPitch * 4;
  static constexpr int kStageBytes = kBytes + kSplitK * kSplitN * 2;
  static constexpr int kSharedBytes = kSplitStages * kStageBytes;
};

// Loads a tile that starts at first_row and first_column. Elements from last_row on, and beyond the
// matrix, become 0.
template <bool kTransposed>
__device__ inline void stage_f32(std::byte* tile, const F32Matrix& from, std::int64_t first_row,
                                 std::int64_t last_row, int first_column) {
  using Tile = SplitTile<kTransposed>;
  constexpr int kFours = Tile::kColumns / 4;
  static_assert(Tile::kRows * kFours % kSplitThreads == 0);
#pragma unroll
  for (int n = 0; n < Tile::kRows * kFours / kSplitThreads; ++n) {
    const int i = n * kSplitThreads + static_cast<int>(threadIdx.x);
    const int row = i / kFours;
    const int column = i % kFours * 4;
    const std::int64_t r = first_row + row;
    const int c = first_column + column;
    const int count = r < last_row ? max(0, min(4, from.columns - c)) : 0;
    const float* source = count > 0 ? from.data + r * from.row_stride + c : from.data;
    copy_async_16(shared_address(tile + (row * Tile::kPitch + column) * 4), source, 4 * count);
  }
}

// Rounds two elements with consecutive k to bf16 (`main`) and rounds the remainders too (`rest`).
__device__ inline void split_pair(float low, float high, unsigned& main, unsigned& rest) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
  const __nv_bfloat162 left =
      __floats2bfloat162_rn(low - __low2float(rounded), high - __high2float(rounded));
  main = *reinterpret_cast<const unsigned*>(&rounded);
  rest = *reinterpret_cast<const unsigned*>(&left);
}

// Loads the [16, 16] fragment at row m and column k, as two operands.
template <bool kTransposed>
__device__ inline void load_split(const float* tile, int m, int k, unsigned (&main)[4],
                                  unsigned (&rest)[4]) {
  constexpr int kPitch = SplitTile<kTransposed>::kPitch;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = m + i % 2 * 8 + lane / 4;
    const int column = k + i / 2 * 8 + lane % 4 * 2;
    if constexpr (kTransposed) {
      split_pair(tile[column * kPitch + row], tile[(column + 1) * kPitch + row], main[i], rest[i]);
    } else {
      const float2 pair = *reinterpret_cast<const float2*>(tile + row * kPitch + column);
      split_pair(pair.x, pair.y, main[i], rest[i]);
    }
  }
}

// The accumulator of a warp: 32 rows by 64 columns. The four warps form a 2 × 2 grid.
using SplitSums = float[2][8][4];

template <bool kTransposed>
__device__ inline void multiply_split(const std::byte* stage, SplitSums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto* a_tile = reinterpret_cast<const float*>(stage);
  const unsigned b_tile = shared_address(stage + SplitTile<kTransposed>::kBytes);
  constexpr int kSteps = kSplitK / 16;
  unsigned main[kSteps][2][4];
  unsigned rest[kSteps][2][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      load_split<kTransposed>(a_tile, warp / 2 * 32 + m * 16, k * 16, main[k][m], rest[k][m]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int octet = warp % 2 * 8 + 2 * n + lane / 16;
    float part[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      unsigned b[4];
      gemm::load_matrices<true>(b, b_tile + octet_offset<kSplitN>(k * 16 + lane % 16, octet));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        gemm::multiply_add(part[m][0], main[k][m], b[0], b[1]);
        gemm::multiply_add(part[m][1], main[k][m], b[2], b[3]);
        gemm::multiply_add(part[m][0], rest[k][m], b[0], b[1]);
        gemm::multiply_add(part[m][1], rest[k][m], b[2], b[3]);
      }
    }
    add_part(part, sums, n);
  }
}

// Accumulates one tile of the product. All of `shared` [kSharedBytes] is free afterwards.
template <bool kTransposed, bool kAligned>
__device__ inline void split_product(const SplitProduct& p, std::byte* shared, std::int64_t first_m,
                                     int first_n, SplitSums& sums) {
  using Tile = SplitTile<kTransposed>;
  const std::int64_t k_first = blockIdx.z * p.k_part;
  const std::int64_t k_last = min(k_first + p.k_part, p.b.rows);
  const int steps =
      k_first < k_last ? static_cast<int>((k_last - k_first + kSplitK - 1) / kSplitK) : 0;
  const Bf16Matrix b{p.b.data, p.b.row_stride, k_last, p.b.columns};
  const auto load = [&](int step) {
    if (step < steps) {
      std::byte* stage = shared + step % kSplitStages * Tile::kStageBytes;
      const std::int64_t k = k_first + std::int64_t{step} * kSplitK;
      if constexpr (kTransposed) {
        stage_f32<true>(stage, p.a, k, k_last, static_cast<int>(first_m));
      } else {
        stage_f32<false>(stage, p.a, first_m, p.a.rows, static_cast<int>(k));
      }
      stage_tile<kSplitK, kSplitN, kSplitThreads, kAligned>(stage + Tile::kBytes, b, k, first_n,
                                                            p.keeps);
    }
    commit_copies();
  };
  for (int step = 0; step < kSplitStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kSplitStages - 2>();
    __syncthreads();
    load(step + kSplitStages - 1);  // into the stage that all threads have just finished with
    multiply_split<kTransposed>(shared + step % kSplitStages * Tile::kStageBytes, sums);
  }
  wait_for_copies<0>();
  __syncthreads();
}

// Calls visit(row, column, sum at that column, sum at the next column) for every pair of the tile.
template <typename Visit>
__device__ inline void for_each_pair(const SplitSums& sums, Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        visit(warp / 2 * 32 + m * 16 + half * 8 + lane / 4, warp % 2 * 64 + n * 8 + lane % 4 * 2,
              sums[m][n][2 * half], sums[m][n][2 * half + 1]);
      }
    }
  }
}

}  // namespace switchyard::cuda
