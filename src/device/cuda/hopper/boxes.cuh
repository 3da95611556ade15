// How a consumer's sums become boxes of rounded numbers in shared memory.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/hopper/ptx.cuh"

namespace switchyard::cuda::hopper {

// 64 of the 256 columns that a consumer has sums of; a thread has 16 pairs of each such chunk.
constexpr int kChunks = 4;
constexpr int kChunkPairs = 16;

__device__ __forceinline__ std::uint32_t round_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// Where 16 bytes of a line of a box lie.
__device__ __forceinline__ std::uint32_t piece_of_box(std::uint32_t box, int line, int piece) {
  return box + line * 128 + ((piece ^ (line & 7)) << 4);
}

// A chunk of a warpgroup's 64 rows; a line of the box is a row. Of every eight columns a thread has
// a pair in the first eight of its warp's sixteen rows, then one in the others.
__device__ __forceinline__ void store_chunk(std::uint32_t box, int thread,
                                            const std::uint32_t (&pairs)[kChunkPairs]) {
  const int line = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_matrices(piece_of_box(box, line, 2 * i + thread % 32 / 16), pairs + i * 4);
  }
}

// The same with a column in every line.
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
