// SPDX-License-Identifier: Apache-2.0
// Loads and stores 16-byte chunks of a row: in one access if rows are aligned to 16 bytes,
// otherwise one element at a time.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace switchyard::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;  // per block, in kernels where each warp has a piece of a row
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kChunkBytes = 16;
template <typename T>
inline constexpr int kChunkElements = kChunkBytes / static_cast<int>(sizeof(T));

// Whether the data will soon be accessed again.
enum class Use : bool { once, again };

inline bool on_chunks(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kChunkBytes == 0;
}

template <typename T>
__device__ inline std::uint32_t bits_of(T value) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(value);
  } else {
    return __bfloat16_as_ushort(value);
  }
}

template <typename T>
__device__ inline T element_of(std::uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    return __ushort_as_bfloat16(static_cast<unsigned short>(bits & 0xffffU));
  }
}

// Loads 16 bytes if `wanted`, otherwise returns `otherwise`. Written in PTX so that the compiler
// never puts consecutive loads into branches, and all are in flight before the first is used.
template <Use use>
__device__ inline uint4 load_if(bool wanted, std::size_t address, uint4 otherwise) {
  uint4 v = otherwise;
  if constexpr (use == Use::once) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "@p ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(address), "r"(static_cast<int>(wanted)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(address), "r"(static_cast<int>(wanted)));
  }
  return v;
}

// Loads the chunk that starts at `column` of a row of `columns`. Elements past the end of the row,
// or all of them if `row` is null, come from `otherwise`. Not for memory that the kernel writes.
template <typename T, bool Wide, Use use>
__device__ inline uint4 load_chunk(const T* row, std::int64_t column, std::int64_t columns,
                                   uint4 otherwise) {
  if constexpr (Wide) {
    const std::size_t address = __cvta_generic_to_global(row) + column * sizeof(T);
    return load_if<use>(row != nullptr && column < columns, address, otherwise);
  } else {
    if (row == nullptr) return otherwise;
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
    constexpr std::uint32_t kMask = kBits == 32 ? ~0U : (1U << (kBits % 32)) - 1;
    std::uint32_t words[4] = {otherwise.x, otherwise.y, otherwise.z, otherwise.w};
#pragma unroll
    for (int e = 0; e < kChunkElements<T>; ++e) {
      const int shift = e * kBits % 32;
      std::uint32_t& word = words[e * kBits / 32];
      if (column + e < columns) {
        word = (word & ~(kMask << shift)) | bits_of(row[column + e]) << shift;
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename T, bool Wide, Use use>
__device__ inline void store_chunk(T* row, std::int64_t column, std::int64_t columns, uint4 chunk) {
  if constexpr (Wide) {
    if (column >= columns) return;
    auto* at = reinterpret_cast<uint4*>(row + column);
    if constexpr (use == Use::once) {
      __stcs(at, chunk);
    } else {
      *at = chunk;
    }
  } else {
    constexpr int kBits = 8 * static_cast<int>(sizeof(T));
    const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int e = 0; e < kChunkElements<T>; ++e) {
      const std::uint32_t bits = words[e * kBits / 32] >> (e * kBits % 32);
      if (column + e < columns) row[column + e] = element_of<T>(bits);
    }
  }
}

template <typename T>
__device__ inline void unpack(uint4 chunk, float (&values)[kChunkElements<T>]) {
  const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      values[w] = __uint_as_float(words[w]);
    } else {  // a bf16 is the upper half of a float
      values[2 * w] = __uint_as_float(words[w] << 16);
      values[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000U);
    }
  }
}

template <typename T>
__device__ inline uint4 pack(const float (&values)[kChunkElements<T>]) {
  std::uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      words[w] = __float_as_uint(values[w]);
    } else {
      words[w] = bits_of(__float2bfloat16_rn(values[2 * w])) |
                 bits_of(__float2bfloat16_rn(values[2 * w + 1])) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Returns a chunk of −0, which changes no sum that it is added to.
template <typename T>
__device__ inline uint4 minus_zeros() {
  constexpr std::uint32_t kWord = sizeof(T) == 4 ? 0x80000000U : 0x80008000U;
  return make_uint4(kWord, kWord, kWord, kWord);
}

}  // namespace switchyard::cuda
