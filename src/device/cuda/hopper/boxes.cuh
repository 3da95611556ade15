// SPDX-License-Identifier: Apache-2.0
// Writes a consumer's rounded accumulators to swizzled boxes in shared memory.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/hopper/ptx.cuh"

namespace switchyard::cuda::hopper {

// A consumer's 256 columns form four chunks of 64. A thread holds 16 pairs of each chunk.
constexpr int kChunks = 4;
constexpr int kChunkPairs = 16;

__device__ __forceinline__ std::uint32_t round_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// Returns the swizzled address of a 16-byte piece of a line in a box.
__device__ __forceinline__ std::uint32_t piece_of_box(std::uint32_t box, int line, int piece) {
  return box + line * 128 + ((piece ^ (line & 7)) << 4);
}

// Stores one chunk of a warpgroup's 64 rows; a line of the box is a row. For every eight columns, a
// thread holds one pair in the first eight of its warp's sixteen rows and one in the last eight.
__device__ __forceinline__ void store_chunk(std::uint32_t box, int thread,
                                            const std::uint32_t (&pairs)[kChunkPairs]) {
  const int line = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_matrices(piece_of_box(box, line, 2 * i + thread % 32 / 16), pairs + i * 4);
  }
}

// Like store_chunk(), but a line of the box is a column.
__device__ __forceinline__ void store_chunk_transposed(std::uint32_t box, int thread,
                                                       const std::uint32_t (&pairs)[kChunkPairs]) {
  const int matrix = thread % 32 / 8;
  const int piece = thread / 32 * 2 + matrix % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = i * 16 + matrix / 2 * 8 + thread % 8;
    store_matrices_transposed(piece_of_box(box, line, piece), pairs + i * 4);
  }
}

}  // namespace switchyard::cuda::hopper
