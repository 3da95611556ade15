// SPDX-License-Identifier: Apache-2.0
// Independent of the library's kernels, so that these are not measured against themselves. The
// dtype does not matter to memory bandwidth, so sums treat the bytes as floats.
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "bench/cpu_ceiling.h"

namespace switchyard::cli {
namespace {

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void spread_avx512(const std::byte* from, std::byte* to,
                                                      std::int64_t stream, std::int64_t top_k,
                                                      std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    const __m512i line = _mm512_loadu_si512(from + i);
    for (std::int64_t k = 0; k < top_k; ++k) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + k * stream + i), line);
    }
  }
}

__attribute__((target("avx512f"))) void collect_avx512(const std::byte* from, std::byte* to,
                                                       std::int64_t stream, std::int64_t top_k,
                                                       std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    __m512 total = _mm512_loadu_ps(from + i);
    for (std::int64_t k = 1; k < top_k; ++k) {
      total = _mm512_add_ps(total, _mm512_loadu_ps(from + k * stream + i));
    }
    _mm512_stream_ps(reinterpret_cast<float*>(to + i), total);
  }
}

void spread_baseline(const std::byte* from, std::byte* to, std::int64_t stream, std::int64_t top_k,
                     std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) {
    for (std::int64_t k = 0; k < top_k; ++k) {
      for (std::int64_t part = i; part < i + 64; part += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + k * stream + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part)));
      }
    }
  }
}

void collect_baseline(const std::byte* from, std::byte* to, std::int64_t stream, std::int64_t top_k,
                      std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 16) {
    __m128 total = _mm_loadu_ps(reinterpret_cast<const float*>(from + i));
    for (std::int64_t k = 1; k < top_k; ++k) {
      total =
          _mm_add_ps(total, _mm_loadu_ps(reinterpret_cast<const float*>(from + k * stream + i)));
    }
    _mm_stream_ps(reinterpret_cast<float*>(to + i), total);
  }
}

bool has_avx512() { return __builtin_cpu_supports("avx512f") != 0; }
void fence() { _mm_sfence(); }
const auto spread = has_avx512() ? spread_avx512 : spread_baseline;
const auto collect = has_avx512() ? collect_avx512 : collect_baseline;

#else

void spread(const std::byte* from, std::byte* to, std::int64_t stream, std::int64_t top_k,
            std::int64_t bytes) {
  for (std::int64_t k = 0; k < top_k; ++k) {
    std::memcpy(to + k * stream, from, static_cast<std::size_t>(bytes));
  }
}

void collect(const std::byte* from, std::byte* to, std::int64_t stream, std::int64_t top_k,
             std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 4) {
    float total = 0.0F;
    for (std::int64_t k = 0; k < top_k; ++k) {
      float term = 0.0F;
      std::memcpy(&term, from + k * stream + i, 4);
      total += term;
    }
    std::memcpy(to + i, &total, 4);
  }
}

void fence() {}

#endif

// Rounds down to whole cache lines; the remainder is too small to matter.
std::int64_t whole_lines(std::int64_t bytes) { return bytes / 64 * 64; }

}  // namespace

void one_read_many_writes(const ConstTensorView& from, const TensorView& to, std::int64_t top_k) {
  const auto stream = whole_lines(to.bytes() / top_k);
  spread(from.data(), to.data(), stream, top_k, whole_lines(from.bytes()));
  fence();
}

void many_reads_one_write(const ConstTensorView& from, const TensorView& to, std::int64_t top_k) {
  const auto stream = whole_lines(from.bytes() / top_k);
  collect(from.data(), to.data(), stream, top_k, whole_lines(to.bytes()));
  fence();
}

}  // namespace switchyard::cli
