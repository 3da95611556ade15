// SPDX-License-Identifier: Apache-2.0
// A 128 × 128 bf16 tile on tensor cores: 4 warps, slices of 32 in k, a ring of 4 pipeline stages.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "device/cuda/portable/async_copy.cuh"
#include "device/cuda/portable/gemm_tile.cuh"

namespace switchyard::cuda::gemm {

// Loads four 8 × 8 matrices; lane l passes the address of line l % 8 of matrix l / 8. `kTurned`
// transposes each matrix.
template <bool kTurned>
__device__ void load_matrices(std::uint32_t (&to)[4], unsigned from) {
  if constexpr (kTurned) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

// sums [16, 8] += a [16, 16] · b [16, 8]
__device__ inline void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns eight elements of a row that need not be aligned, with zeros from `count` on.
__device__ inline uint4 load_eight(const __nv_bfloat16* from, int count) {
  const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = 2 * i < count ? bits[2 * i] : 0;
    const std::uint32_t high = 2 * i + 1 < count ? bits[2 * i + 1] : 0;
    pairs[i] = low | high << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Writes 8 elements to shared memory, with zeros from `count` on. Both variants write the same
// values.
template <bool kAligned>
__device__ void copy_chunk(unsigned to, const __nv_bfloat16* from, int count) {
  if constexpr (kAligned) {
    copy_async_16(to, from, count * 2);
  } else {
    const uint4 words = load_eight(from, count);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
  }
}

// The part of an operand's stage that has elements. Bit i of `kept` stands for a thread's copy i.
struct StageExtent {
  int lines;
  int k;
  unsigned kept = ~0U;
};

// Layout of an operand in a stage, as in global memory: [kLines, kDepth of k] or its transpose.
// Chunks of 16 bytes are swizzled so that the 8 lines of a matrix fall on different banks.
template <bool kKMajor, int kLines = 128, int kDepth = 32, int kThreads = 128>
struct OperandStage {
  static constexpr int kChunks = (kKMajor ? kDepth : kLines) / 8;
  static constexpr int kLineBytes = kChunks * 16;
  static constexpr int kLinesAtOnce = kThreads / kChunks;
  static constexpr int kBytes = kLines * kDepth * 2;
  static constexpr int kCopies = kBytes / 16 / kThreads;  // per thread
  static_assert(kChunks == 4 || kChunks % 8 == 0);
  static_assert(kLinesAtOnce % 8 == 0);  // the swizzle repeats
  static_assert(kCopies * 16 * kThreads == kBytes);

  static __device__ unsigned offset(int line, int chunk) {
    const int place = kChunks == 4 ? chunk ^ ((line >> 1) & 3) : chunk ^ (line & 7);
    return static_cast<unsigned>(line * kLineBytes + place * 16);
  }

  // Elements beyond the extent are zeroed and not read.
  template <bool kAligned>
  static __device__ void fill(unsigned stage, const __nv_bfloat16* from, std::int64_t stride,
                              const StageExtent& extent) {
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int first = static_cast<int>(threadIdx.x) / kChunks;
    const int outer = kKMajor ? extent.lines : extent.k;
    const int inner = min(max((kKMajor ? extent.k : extent.lines) - chunk * 8, 0), 8);
    const unsigned to = stage + offset(first, chunk);
    const __nv_bfloat16* source = from + first * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const bool is_there = first + i * kLinesAtOnce < outer && (extent.kept >> i & 1U) != 0;
      const int count = is_there ? inner : 0;
      const __nv_bfloat16* line = source + i * kLinesAtOnce * stride;
      copy_chunk<kAligned>(to + i * kLinesAtOnce * kLineBytes, count > 0 ? line : from, count);
    }
  }

  // Loads lines line … line + 15 and k … k + 15 as the first operand of multiply_add().
  static __device__ void load_a(std::uint32_t (&to)[4], unsigned stage, int line, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = kKMajor ? line + lane % 16 : k + lane / 16 * 8 + lane % 8;
    const int chunk = kKMajor ? k / 8 + lane / 16 : line / 8 + lane / 8 % 2;
    load_matrices<!kKMajor>(to, stage + offset(low, chunk));
  }
  // Loads the same range as the second operands of two multiply_add() calls.
  static __device__ void load_b(std::uint32_t (&to)[4], unsigned stage, int line, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = kKMajor ? line + lane / 16 * 8 + lane % 8 : k + lane / 8 % 2 * 8 + lane % 8;
    const int chunk = kKMajor ? k / 8 + lane / 8 % 2 : line / 8 + lane / 16;
    load_matrices<!kKMajor>(to, stage + offset(low, chunk));
  }
};

template <bool kAKMajor, bool kBKMajor, bool kAligned>
class TensorCoreTile {
 public:
  using Element = __nv_bfloat16;
  static constexpr int kThreads = 128;
  static constexpr int kStages = 4;
  static constexpr int kStageBytes =
      OperandStage<kAKMajor>::kBytes + OperandStage<kBKMajor>::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes >= kStagedBytes);

  // While one half of a slice is multiplied, the other is loaded from shared memory.
  __device__ void multiply(const Tile<Element>& tile, void* shared) {
    const unsigned ring = shared_address(shared);
    const int count = num_slices<kDepth>(tile);
    for (int i = 0; i < kStages - 1; ++i) fetch(tile, i, count, ring);
    wait_for_copies<kStages - 2>();
    __syncthreads();
    Fragments even;
    Fragments odd;
    even.load(ring, 0);
    for (int i = 0; i < count; ++i) {
      odd.load(stage_of(ring, i), kDepth / 2);
      fetch(tile, i + kStages - 1, count, ring);
      add(even);
      wait_for_copies<kStages - 2>();
      __syncthreads();
      even.load(stage_of(ring, i + 1), 0);  // unused after the last slice
      add(odd);
    }
  }

  __device__ void stage(float* staged) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int row = warp_row() + i * 16 + lane / 4;
        const int column = warp_column() + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(staged + staged_index(row, column)) =
            make_float2(sums_[i][j][0], sums_[i][j][1]);
        *reinterpret_cast<float2*>(staged + staged_index(row + 8, column)) =
            make_float2(sums_[i][j][2], sums_[i][j][3]);
      }
    }
  }

 private:
  static constexpr int kDepth = 32;

  struct Fragments {
    __device__ void load(unsigned stage, int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        OperandStage<kAKMajor>::load_a(a[i], stage, warp_row() + i * 16, k);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        OperandStage<kBKMajor>::load_b(b[j], stage + OperandStage<kAKMajor>::kBytes,
                                       warp_column() + j * 16, k);
      }
    }

    std::uint32_t a[4][4];
    std::uint32_t b[4][4];
  };

  static __device__ int warp_row() { return static_cast<int>(threadIdx.x) / 32 % 2 * 64; }
  static __device__ int warp_column() { return static_cast<int>(threadIdx.x) / 64 * 64; }
  static __device__ unsigned stage_of(unsigned ring, int index) {
    return ring + index % kStages * kStageBytes;
  }

  // Slices past the last commit an empty group, so that the wait count is always the same.
  static __device__ void fetch(const Tile<Element>& tile, int index, int count, unsigned ring) {
    if (index < count) {
      const auto slice = slice_of<kDepth, kAKMajor, kBKMajor>(tile, index);
      const unsigned stage = stage_of(ring, index);
      OperandStage<kAKMajor>::template fill<kAligned>(stage, slice.a, tile.a_stride,
                                                      {tile.rows, slice.k});
      OperandStage<kBKMajor>::template fill<kAligned>(
          stage + OperandStage<kAKMajor>::kBytes, slice.b, slice.b_stride, {tile.columns, slice.k});
    }
    commit_copies();
  }

  __device__ void add(const Fragments& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        multiply_add(sums_[i][j], from.a[i], from.b[j / 2][j % 2 * 2],
                     from.b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  float sums_[4][8][4] = {};
};

}  // namespace switchyard::cuda::gemm
