// SPDX-License-Identifier: Apache-2.0
// A 128 × 128 f32 tile without tensor cores: 256 threads, slices of 16 in k, a ring of 4 pipeline
// stages.
#pragma once

#include <cstdint>

#include "device/cuda/portable/async_copy.cuh"
#include "device/cuda/portable/gemm_tile.cuh"

namespace switchyard::cuda::gemm {

// Each thread holds 8 × 8 sums: two blocks of 4 rows by two blocks of 4 columns, 64 apart.
template <bool kAKMajor, bool kBKMajor>
class FmaTile {
 public:
  using Element = float;
  static constexpr int kThreads = 256;
  static constexpr int kStages = 4;
  static constexpr int kDepth = 16;
  static constexpr int kPitch = 128 + 4;  // padding: consecutive k are 4 banks apart
  static constexpr int kOperand = kDepth * kPitch;
  static constexpr int kSharedBytes = kStages * 2 * kOperand * static_cast<int>(sizeof(float));
  static_assert(kSharedBytes >= kStagedBytes);

  __device__ void multiply(const Tile<float>& tile, void* shared) {
    auto* ring = static_cast<float*>(shared);
    const int count = num_slices<kDepth>(tile);
    for (int i = 0; i < kStages - 1; ++i) fetch(tile, i, count, ring);
    for (int i = 0; i < count; ++i) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      fetch(tile, i + kStages - 1, count, ring);
      add(ring + i % kStages * 2 * kOperand);
    }
  }

  __device__ void stage(float* staged) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const int row = thread_row() + i / 4 * 64 + i % 4;
        *reinterpret_cast<float4*>(staged + staged_index(row, thread_column() + j / 4 * 64)) =
            make_float4(sums_[i][j], sums_[i][j + 1], sums_[i][j + 2], sums_[i][j + 3]);
      }
    }
  }

 private:
  static __device__ int thread_row() { return static_cast<int>(threadIdx.x) / 16 * 4; }
  static __device__ int thread_column() { return static_cast<int>(threadIdx.x) % 16 * 4; }

  // Writes an operand as [k, line]. Elements beyond `lines` or `k` are zeroed and not read.
  template <bool kKMajor>
  static __device__ void fill(float* stage, const float* from, std::int64_t stride, int lines,
                              int k) {
    constexpr int kInner = kKMajor ? kDepth : 128;
    constexpr int kOutersAtOnce = kThreads / kInner;
    const int inner = static_cast<int>(threadIdx.x) % kInner;
    const int first = static_cast<int>(threadIdx.x) / kInner;
    const int outers = inner < (kKMajor ? k : lines) ? (kKMajor ? lines : k) : 0;
    const unsigned to =
        shared_address(stage + (kKMajor ? inner * kPitch + first : first * kPitch + inner));
    const float* source = from + first * stride + inner;
#pragma unroll
    for (int i = 0; i < kDepth * 128 / kThreads; ++i) {
      const bool exists = first + i * kOutersAtOnce < outers;
      const int step = i * kOutersAtOnce * (kKMajor ? 1 : kPitch) * static_cast<int>(sizeof(float));
      copy_async_4(to + step, exists ? source + i * kOutersAtOnce * stride : from, exists ? 4 : 0);
    }
  }

  // Slices past the last commit an empty group, so that the wait count is always the same.
  static __device__ void fetch(const Tile<float>& tile, int index, int count, float* ring) {
    if (index < count) {
      const auto slice = slice_of<kDepth, kAKMajor, kBKMajor>(tile, index);
      float* stage = ring + index % kStages * 2 * kOperand;
      fill<kAKMajor>(stage, slice.a, tile.a_stride, tile.rows, slice.k);
      fill<kBKMajor>(stage + kOperand, slice.b, slice.b_stride, tile.columns, slice.k);
    }
    commit_copies();
  }

  static __device__ void read(float (&to)[8], const float* line) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(line);
    *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(line + 64);
  }

  __device__ void add(const float* stage) {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      alignas(16) float a[8];
      alignas(16) float b[8];
      read(a, stage + k * kPitch + thread_row());
      read(b, stage + kOperand + k * kPitch + thread_column());
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sums_[i][j] = fmaf(a[i], b[j], sums_[i][j]);
      }
    }
  }

  float sums_[8][8] = {};
};

}  // namespace switchyard::cuda::gemm
