// The row kernels, compiled once for each instruction set (SWITCHYARD_ISA). Uses no library code:
// what the linker might share between the variants must not need the instructions of one of them.
#include "device/cpu/row_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLanes = 16;

typedef float F32x16 __attribute__((vector_size(64)));
typedef std::uint32_t U32x16 __attribute__((vector_size(64)));
typedef std::uint16_t U16x16 __attribute__((vector_size(32)));

struct F32 {
  static constexpr std::int64_t kBytes = 4;
};
struct Bf16 {
  static constexpr std::int64_t kBytes = 2;
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

inline F32x16 load(F32, const std::byte* from) { return load_raw<F32x16>(from); }

inline F32x16 load(Bf16, const std::byte* from) {
  const auto bits = __builtin_convertvector(load_raw<U16x16>(from), U32x16) << 16;
  return reinterpret_cast<F32x16>(bits);
}

inline void store(F32, std::byte* to, F32x16 value, Stores stores) {
  store_raw(to, &value, sizeof(value), stores);
}

// Rounds to nearest even; NaNs stay NaNs.
inline void store(Bf16, std::byte* to, F32x16 value, Stores stores) {
  const auto bits = reinterpret_cast<U32x16>(value);
  const auto rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const auto quiet = (bits >> 16) | 0x40U;
  const auto is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  const auto chosen = is_nan ? quiet : rounded;
  const auto half = __builtin_convertvector(chosen, U16x16);
  store_raw(to, &half, sizeof(half), stores);
}

// A row's last elements pass through a full vector of scratch, so that they see the same code.
template <typename Type>
inline F32x16 load_tail(Type type, const std::byte* from, std::int64_t elements) {
  std::byte padded[64] = {};
  __builtin_memcpy(padded, from, static_cast<std::size_t>(elements * Type::kBytes));
  return load(type, padded);
}

template <typename Type>
inline void store_tail(Type type, std::byte* to, F32x16 value, std::int64_t elements) {
  std::byte padded[64];
  store(type, padded, value, Stores::cached);
  __builtin_memcpy(to, padded, static_cast<std::size_t>(elements * Type::kBytes));
}

template <Stores stores>
void copy_row(std::byte* const* to, int count, const std::byte* from, std::int64_t bytes) {
  std::int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    const auto line = load_raw<U32x16>(from + i);
    for (int c = 0; c < count; ++c) store_raw(to[c] + i, &line, sizeof(line), stores);
  }
  for (int c = 0; c < count; ++c) {
    __builtin_memcpy(to[c] + i, from + i, static_cast<std::size_t>(bytes - i));
  }
}

void copy(std::byte* const* to, int count, const std::byte* from, std::int64_t bytes,
          Stores stores) {
  if (stores == Stores::streaming) {
    copy_row<Stores::streaming>(to, count, from, bytes);
  } else {
    copy_row<Stores::cached>(to, count, from, bytes);
  }
}

template <typename Type>
void scale(std::byte* const* to, const float* scales, int count, const std::byte* from,
           std::int64_t elements, Stores stores) {
  constexpr Type type;
  std::int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    const auto value = load(type, from + i * Type::kBytes);
    for (int c = 0; c < count; ++c) {
      store(type, to[c] + i * Type::kBytes, scales[c] * value, stores);
    }
  }
  if (i == elements) return;
  const auto value = load_tail(type, from + i * Type::kBytes, elements - i);
  for (int c = 0; c < count; ++c) {
    store_tail(type, to[c] + i * Type::kBytes, scales[c] * value, elements - i);
  }
}

template <typename Load>
inline F32x16 sum_block(const std::byte* const* from, const float* weights, int count,
                        std::int64_t offset, Load load_block) {
  if (count == 0) return F32x16{};
  // The sum begins with the first term, not with 0 + it: a copy keeps the sign of zero.
  auto total = load_block(from[0] + offset);
  if (weights == nullptr) {
    for (int c = 1; c < count; ++c) total = total + load_block(from[c] + offset);
  } else {
    total = weights[0] * total;
    for (int c = 1; c < count; ++c) total = total + weights[c] * load_block(from[c] + offset);
  }
  return total;
}

template <typename Type>
void sum(std::byte* to, const std::byte* const* from, const float* weights, int count,
         std::int64_t elements, Stores stores) {
  constexpr Type type;
  std::int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    const auto offset = i * Type::kBytes;
    const auto total =
        sum_block(from, weights, count, offset, [](const std::byte* p) { return load(Type{}, p); });
    store(type, to + offset, total, stores);
  }
  if (i == elements) return;
  const auto offset = i * Type::kBytes;
  const auto rest = elements - i;
  const auto total = sum_block(from, weights, count, offset,
                               [rest](const std::byte* p) { return load_tail(Type{}, p, rest); });
  store_tail(type, to + offset, total, rest);
}

template <typename Type>
float dot(const std::byte* a, const std::byte* b, std::int64_t elements) {
  constexpr Type type;
  F32x16 lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) {
    lanes = lanes + load(type, a + i * Type::kBytes) * load(type, b + i * Type::kBytes);
  }
  if (i < elements) {
    lanes = lanes + load_tail(type, a + i * Type::kBytes, elements - i) *
                        load_tail(type, b + i * Type::kBytes, elements - i);
  }
  for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::int64_t j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
  }
  return lanes[0];
}

void publish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

#define SWITCHYARD_JOIN_(a, b) a##b
#define SWITCHYARD_JOIN(a, b) SWITCHYARD_JOIN_(a, b)
#define SWITCHYARD_TEXT_(a) #a
#define SWITCHYARD_TEXT(a) SWITCHYARD_TEXT_(a)

const RowKernels SWITCHYARD_JOIN(kRowKernels_, SWITCHYARD_ISA) = {
    SWITCHYARD_TEXT(SWITCHYARD_ISA),     copy,    {scale<F32>, sum<F32>, dot<F32>},
    {scale<Bf16>, sum<Bf16>, dot<Bf16>}, publish,
};

}  // namespace switchyard::cpu
