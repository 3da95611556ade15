// The row kernels, compiled once for each instruction set (SWITCHYARD_ISA). Uses no library code:
// what the linker might share between the variants must not need the instructions of one of them.
#include "device/cpu/row_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard::cpu {
namespace {

// Vectors are as wide as the instruction set has them.
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

// Kernels work on whole cache lines: what is streamed to several places at once must fill a line of
// one place before it goes to the next.
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

// A row's last elements pass through a full line of scratch, so that they see the same code.
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

void copy(std::byte* const* to, int count, const std::byte* from, std::int64_t bytes,
          Stores stores) {
  if (stores == Stores::cached) {
    for (int c = 0; c < count; ++c) {
      __builtin_memcpy(to[c], from, static_cast<std::size_t>(bytes));
    }
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    const auto line = load(F32{}, from + i);
    for (int c = 0; c < count; ++c) store(F32{}, to[c] + i, line, Stores::streaming);
  }
}

template <typename Type>
void scale(std::byte* const* to, const float* scales, int count, const std::byte* from,
           std::int64_t elements, Stores stores) {
  constexpr Type type;
  const std::int64_t bytes = elements * Type::kBytes;
  std::int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    const auto line = load(type, from + i);
    for (int c = 0; c < count; ++c) store(type, to[c] + i, scales[c] * line, stores);
  }
  if (i == bytes) return;
  const std::int64_t rest = (bytes - i) / Type::kBytes;
  const auto line = load_tail(type, from + i, rest);
  for (int c = 0; c < count; ++c) store_tail(type, to[c] + i, scales[c] * line, rest);
}

template <typename Type, typename Load>
inline Line<Type> sum_lines(const SumTerms& terms, std::int64_t offset, Load load_line) {
  if (terms.count == 0) return {};
  // The sum begins with the first term, not with 0 + it: a copy keeps the sign of zero.
  Line<Type> total = load_line(terms.rows[0] + offset);
  if (terms.weights == nullptr) {
    for (int c = 1; c < terms.count; ++c) total = total + load_line(terms.rows[c] + offset);
  } else {
    total = terms.weights[0] * total;
    for (int c = 1; c < terms.count; ++c) {
      total = total + terms.weights[c] * load_line(terms.rows[c] + offset);
    }
  }
  return total;
}

// Sums of a known number of terms, kBlock bytes of each row at a time. Later rows are fetched as
// far as the second cache only: the first allows too few misses at once. (Of a sequential pass, two
// terms reach 80% and more this way, 60% when fetched into the first cache or not at all.)
constexpr std::int64_t kBlock = 2 * kLine;

template <typename Type, int kCount, bool kWeighted>
std::int64_t sum_blocks(std::byte* to, const SumTerms& terms, std::int64_t bytes, Stores stores) {
  constexpr Type type;
  const std::byte* rows[kCount];
  const std::byte* later[kCount];
  float weights[kCount];
  for (int c = 0; c < kCount; ++c) {
    rows[c] = terms.rows[c];
    later[c] = c < terms.later_count ? terms.later_rows[c] : rows[c];
    weights[c] = kWeighted ? terms.weights[c] : 1.0F;
  }
  std::int64_t i = 0;
  for (; i + kBlock <= bytes; i += kBlock) {
    for (int c = 0; c < kCount; ++c) {
      __builtin_prefetch(later[c] + i, 0, 2);
      __builtin_prefetch(later[c] + i + kLine, 0, 2);
    }
    Line<Type> low = load(type, rows[0] + i);
    Line<Type> high = load(type, rows[0] + i + kLine);
    if constexpr (kWeighted) {
      low = weights[0] * low;
      high = weights[0] * high;
    }
    for (int c = 1; c < kCount; ++c) {
      const auto next_low = load(type, rows[c] + i);
      const auto next_high = load(type, rows[c] + i + kLine);
      low = low + (kWeighted ? weights[c] * next_low : next_low);
      high = high + (kWeighted ? weights[c] * next_high : next_high);
    }
    store(type, to + i, low, stores);
    store(type, to + i + kLine, high, stores);
  }
  return i;
}

template <typename Type, int kCount>
std::int64_t sum_blocks(std::byte* to, const SumTerms& terms, std::int64_t bytes, Stores stores) {
  if (terms.count != kCount) {
    if constexpr (kCount > 1) return sum_blocks<Type, kCount - 1>(to, terms, bytes, stores);
    return 0;
  }
  return terms.weights != nullptr ? sum_blocks<Type, kCount, true>(to, terms, bytes, stores)
                                  : sum_blocks<Type, kCount, false>(to, terms, bytes, stores);
}

constexpr int kMostKnownTerms = 8;

template <typename Type>
void sum(std::byte* to, const SumTerms& terms, std::int64_t elements, Stores stores) {
  constexpr Type type;
  const std::int64_t bytes = elements * Type::kBytes;
  std::int64_t i = sum_blocks<Type, kMostKnownTerms>(to, terms, bytes, stores);
  for (; i + kLine <= bytes; i += kLine) {
    const auto total =
        sum_lines<Type>(terms, i, [](const std::byte* p) { return load(Type{}, p); });
    store(type, to + i, total, stores);
  }
  if (i == bytes) return;
  const std::int64_t rest = (bytes - i) / Type::kBytes;
  const auto total =
      sum_lines<Type>(terms, i, [rest](const std::byte* p) { return load_tail(Type{}, p, rest); });
  store_tail(type, to + i, total, rest);
}

// Sixteen sums take turns, whatever the width of a vector, and are added pairwise at the end.
template <typename Type>
float dot(const std::byte* a, const std::byte* b, std::int64_t elements) {
  constexpr Type type;
  constexpr int kSums = 16;
  constexpr int kSumVectors = kSums / kLanes;
  const std::int64_t bytes = elements * Type::kBytes;
  Floats sums[kSumVectors] = {};
  const auto add = [&sums](const Line<Type>& x, const Line<Type>& y) {
    for (int v = 0; v < Line<Type>::kVectors; ++v) {
      sums[v % kSumVectors] = sums[v % kSumVectors] + x.vectors[v] * y.vectors[v];
    }
  };
  std::int64_t i = 0;
  for (; i + kLine <= bytes; i += kLine) add(load(type, a + i), load(type, b + i));
  if (i < bytes) {
    const std::int64_t rest = (bytes - i) / Type::kBytes;
    add(load_tail(type, a + i, rest), load_tail(type, b + i, rest));
  }
  float lanes[kSums];
  __builtin_memcpy(lanes, sums, sizeof(lanes));
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
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
