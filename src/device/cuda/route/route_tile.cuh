// bf16 tiles in shared memory, for tensor cores from sm_80 on.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "device/cuda/portable/gemm_bf16.cuh"

namespace switchyard::cuda {

struct Bf16Matrix {
  const __nv_bfloat16* data;
  std::int64_t row_stride;
  std::int64_t rows;
  int columns;
};

// Returns the byte offset of eight elements of a tile with rows of kColumns. Octets are swizzled by
// row, so that the same octet of eight rows lies in different banks.
template <int kColumns>
__device__ inline int octet_offset(int row, int octet) {
  return row * kColumns * 2 + ((octet ^ (row & 7)) << 4);
}

// Loads a tile of the matrix that starts at first_row and first_column. Elements beyond the matrix,
// and rows whose `keeps` is 0, become 0.
template <int kRows, int kColumns, int kThreads, bool kAligned>
__device__ inline void stage_tile(std::byte* tile, const Bf16Matrix& from, std::int64_t first_row,
                                  int first_column, const std::int32_t* keeps = nullptr) {
  constexpr int kOctets = kColumns / 8;
  static_assert(kRows * kOctets % kThreads == 0);
#pragma unroll
  for (int n = 0; n < kRows * kOctets / kThreads; ++n) {
    const int i = n * kThreads + static_cast<int>(threadIdx.x);
    const int row = i / kOctets;
    const int octet = i % kOctets;
    const std::int64_t r = first_row + row;
    const int column = first_column + octet * 8;
    const bool is_there = r < from.rows && (keeps == nullptr || keeps[r] != 0);
    const int count = is_there ? max(0, min(8, from.columns - column)) : 0;
    const auto* source = count > 0 ? from.data + r * from.row_stride + column : from.data;
    gemm::copy_chunk<kAligned>(shared_address(tile + octet_offset<kColumns>(row, octet)), source,
                               count);
  }
}

// Adds a partial sum to the accumulators. Tensor cores truncate their sums instead of rounding, so
// adding short partial sums here keeps that error small.
template <int kN>
__device__ inline void add_part(const float (&part)[2][2][4], float (&sums)[2][kN][4], int n) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[m][2 * n][i] += part[m][0][i];
      sums[m][2 * n + 1][i] += part[m][1][i];
    }
  }
}

}  // namespace switchyard::cuda
