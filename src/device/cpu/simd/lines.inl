// SPDX-License-Identifier: Apache-2.0
// Rows as cache lines of floats, shared by the kernels of one instruction set. Only they include
// it, outside any namespace. Like them, it uses no library code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "device/cpu/simd/row_kernels.h"

#define SWITCHYARD_JOIN_(a, b) a##b
#define SWITCHYARD_JOIN(a, b) SWITCHYARD_JOIN_(a, b)
#define SWITCHYARD_TEXT_(a) #a
#define SWITCHYARD_TEXT(a) SWITCHYARD_TEXT_(a)

namespace switchyard::cpu {
namespace {

// Vectors have the full width of the instruction set.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Kernels work on whole cache lines: streaming stores to several places must fill a line at one
// place before they move on to the next.
constexpr std::int64_t kLine = 64;

struct F32 {
  static constexpr std::int64_t kBytes = 4;
};
struct Bf16 {
  static constexpr std::int64_t kBytes = 2;
};

// The elements of one line, as floats.
template <typename Type>
struct Line {
  static constexpr std::int64_t kElements = kLine / Type::kBytes;
  static constexpr int kVectors = static_cast<int>(kElements / kLanes);
  Floats vectors[kVectors];
};

template <typename Vector>
inline Vector load_raw(const std::byte* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_raw(std::byte* to, const void* value, std::size_t bytes, Stores stores) {
  if (stores == Stores::cached) {
    __builtin_memcpy(to, value, bytes);
    return;
  }
#if defined(__AVX512F__)
  if (bytes == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(value));
    return;
  }
#endif
#if defined(__AVX2__)
  for (std::size_t i = 0; i < bytes; i += 32) {
    const auto* part = reinterpret_cast<const __m256i*>(static_cast<const char*>(value) + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(part));
  }
#elif defined(__x86_64__)
  for (std::size_t i = 0; i < bytes; i += 16) {
    const auto* part = reinterpret_cast<const __m128i*>(static_cast<const char*>(value) + i);
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(part));
  }
#else
  __builtin_memcpy(to, value, bytes);
#endif
}

inline Line<F32> load(F32, const std::byte* from) {
  Line<F32> line;
  for (int v = 0; v < Line<F32>::kVectors; ++v) {
    line.vectors[v] = load_raw<Floats>(from + v * kLanes * F32::kBytes);
  }
  return line;
}

inline Line<Bf16> load(Bf16, const std::byte* from) {
  Line<Bf16> line;
  for (int v = 0; v < Line<Bf16>::kVectors; ++v) {
    const auto halves = load_raw<Halves>(from + v * kLanes * Bf16::kBytes);
    line.vectors[v] = reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
  }
  return line;
}

inline void store(F32, std::byte* to, const Line<F32>& line, Stores stores) {
  for (int v = 0; v < Line<F32>::kVectors; ++v) {
    store_raw(to + v * kLanes * F32::kBytes, &line.vectors[v], sizeof(Floats), stores);
  }
}

// Rounds to nearest even; NaNs stay NaNs.
inline Halves round_to_bf16(Floats value) {
  const auto bits = reinterpret_cast<Words>(value);
  const auto rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const auto quiet = (bits >> 16) | 0x40U;
  const auto size = reinterpret_cast<Ints>(bits & 0x7fffffffU);
  const auto is_nan = reinterpret_cast<Words>(size > 0x7f800000);
  return __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), Halves);
}

inline void store(Bf16, std::byte* to, const Line<Bf16>& line, Stores stores) {
  Halves halves[Line<Bf16>::kVectors];
  for (int v = 0; v < Line<Bf16>::kVectors; ++v) halves[v] = round_to_bf16(line.vectors[v]);
  store_raw(to, halves, kLine, stores);
}

template <typename Type>
inline Line<Type> operator*(float factor, Line<Type> line) {
  for (auto& vector : line.vectors) vector = factor * vector;
  return line;
}

template <typename Type>
inline Line<Type> operator+(Line<Type> a, const Line<Type>& b) {
  for (int v = 0; v < Line<Type>::kVectors; ++v) a.vectors[v] = a.vectors[v] + b.vectors[v];
  return a;
}

// The last elements of a row pass through a zero-padded line, so that the same code computes them.
template <typename Type>
inline Line<Type> load_tail(Type type, const std::byte* from, std::int64_t elements) {
  std::byte padded[kLine] = {};
  __builtin_memcpy(padded, from, static_cast<std::size_t>(elements * Type::kBytes));
  return load(type, padded);
}

template <typename Type>
inline void store_tail(Type type, std::byte* to, const Line<Type>& line, std::int64_t elements) {
  std::byte padded[kLine];
  store(type, padded, line, Stores::cached);
  __builtin_memcpy(to, padded, static_cast<std::size_t>(elements * Type::kBytes));
}

// Elements are added to sixteen sums in turn, whatever the vector width, so that the bits do not
// depend on it. The sums are added pairwise at the end.
constexpr int kSums = 16;
constexpr int kSumVectors = kSums / kLanes;

inline float add_pairwise(const Floats (&sums)[kSumVectors]) {
  float lanes[kSums];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  }
  return lanes[0];
}

}  // namespace
}  // namespace switchyard::cpu
