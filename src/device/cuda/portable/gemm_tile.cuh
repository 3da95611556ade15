// SPDX-License-Identifier: Apache-2.0
// One tile of a product: its operands, and the epilogue that stores its sums.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace switchyard::cuda::gemm {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 128;

// c[i, j] = Σ_k a[i, k] · b[j, k] for i < rows, j < columns. An operand is stored as [line, k]
// (K-major) or [k, line]; its stride is that of the outer dimension.
template <typename T>
struct Tile {
  const T* a = nullptr;
  std::int64_t a_stride = 0;
  const T* b = nullptr;
  std::int64_t b_stride = 0;
  int k = 0;
  // A second sum over k that continues the first, if has_next.
  const T* next_a = nullptr;
  const T* next_b = nullptr;
  std::int64_t next_b_stride = 0;
  bool has_next = false;

  int rows = 0;  // at most kTileRows; 0: nothing to do
  int columns = 0;
  void* c = nullptr;
  std::int64_t c_stride = 0;
  bool c_is_f32 = false;
  bool c_is_aligned = false;  // every row of c begins on 16 bytes
  bool accumulate = false;
  const T* bias = nullptr;         // [columns] or null
  const float* factors = nullptr;  // [rows] or null: all 1
};

// The operands of one step of the sum. `k` elements are left; a step takes at most kDepth.
template <typename T>
struct Slice {
  const T* a;
  const T* b;
  std::int64_t b_stride;
  int k;
};

template <int kDepth, typename T>
__device__ int num_slices(const Tile<T>& tile) {
  const int each = (tile.k + kDepth - 1) / kDepth;
  return tile.has_next ? 2 * each : each;
}

template <int kDepth, bool kAKMajor, bool kBKMajor, typename T>
__device__ Slice<T> slice_of(const Tile<T>& tile, int index) {
  const int each = (tile.k + kDepth - 1) / kDepth;
  const bool next = index >= each;
  const int first = (next ? index - each : index) * kDepth;
  const std::int64_t b_stride = next ? tile.next_b_stride : tile.b_stride;
  return {(next ? tile.next_a : tile.a) + first * (kAKMajor ? 1 : tile.a_stride),
          (next ? tile.next_b : tile.b) + first * (kBKMajor ? 1 : b_stride), b_stride,
          tile.k - first};
}

// Sums are staged in shared memory in pieces of 8 columns, swizzled by row to reduce bank conflicts
// on both writes and reads.
constexpr int kPiece = 8;
constexpr int kStagedBytes = kTileRows * kTileColumns * static_cast<int>(sizeof(float));
__device__ inline int staged_index(int row, int column) {
  return row * kTileColumns + ((column / kPiece) ^ (row & 7)) * kPiece + column % kPiece;
}

__device__ inline float to_f32(float value) { return value; }
__device__ inline float to_f32(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename To>
__device__ To rounded(float value);
template <>
__device__ inline float rounded<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// to (+)= sum
template <typename T>
__device__ inline void put(T& to, float sum, bool accumulate) {
  to = rounded<T>(accumulate ? to_f32(to) + sum : sum);
}

// A piece of a row of c, accessed in units of 16 bytes if it is whole and aligned.
template <typename C>
struct alignas(16) RowPiece {
  C values[kPiece];
};

template <typename C>
__device__ void store_piece(C* c, float (&sums)[kPiece], int count, bool aligned, bool accumulate) {
  if (aligned && count == kPiece) {
    auto* whole = reinterpret_cast<RowPiece<C>*>(c);
    RowPiece<C> piece;
    if (accumulate) {
      piece = *whole;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sums[j] += to_f32(piece.values[j]);
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.values[j] = rounded<C>(sums[j]);
    *whole = piece;
    return;
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    if (j < count) c[j] = rounded<C>(accumulate ? sums[j] + to_f32(c[j]) : sums[j]);
  }
}

// Called by all threads of a block, after their sums are staged.
template <int kThreads, typename T>
__device__ void store_tile(const Tile<T>& tile, const float* staged) {
  constexpr int kPieces = kTileColumns / kPiece;
  const int column = static_cast<int>(threadIdx.x) % kPieces * kPiece;
  const int count = min(tile.columns - column, kPiece);
  float bias[kPiece];
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    bias[j] = tile.bias != nullptr && j < count ? to_f32(tile.bias[column + j]) : 0.0F;
  }
  if (count <= 0) return;
  for (int row = threadIdx.x / kPieces; row < tile.rows; row += kThreads / kPieces) {
    float sums[kPiece];
    const float* from = staged + staged_index(row, column);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) sums[j] = from[j];
    if (tile.bias != nullptr) {
      const float factor = tile.factors == nullptr ? 1.0F : tile.factors[row];
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sums[j] = fmaf(factor, bias[j], sums[j]);
    }
    const std::int64_t place = row * tile.c_stride + column;
    if (sizeof(T) == sizeof(float) || tile.c_is_f32) {
      store_piece(static_cast<float*>(tile.c) + place, sums, count, tile.c_is_aligned,
                  tile.accumulate);
    } else {
      store_piece(static_cast<T*>(tile.c) + place, sums, count, tile.c_is_aligned, tile.accumulate);
    }
  }
}

}  // namespace switchyard::cuda::gemm
