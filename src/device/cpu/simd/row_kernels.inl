// SPDX-License-Identifier: Apache-2.0
// The row kernels, compiled once for each instruction set (SWITCHYARD_ISA). They use no library
// code: the linker might keep one variant's copy of it for all, with instructions that a CPU lacks.
#include "device/cpu/simd/lines.inl"
#include "device/cpu/simd/row_kernels.h"

namespace switchyard::cpu {
namespace {

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
  // Starts with the first term, not with 0 plus it, so that a single −0 keeps its sign.
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

// Sums a compile-time number of terms, kBlock bytes of each row at a time. Later rows are
// prefetched only into L2, because L1 allows too few misses at once. (With two terms this reaches
// at least 80% of the speed of a sequential pass; prefetching into L1 or not at all reaches 60%.)
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

template <typename Type>
float dot(const std::byte* a, const std::byte* b, std::int64_t elements) {
  constexpr Type type;
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
  return add_pairwise(sums);
}

void publish() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

const RowKernels SWITCHYARD_JOIN(kRowKernels_, SWITCHYARD_ISA) = {
    SWITCHYARD_TEXT(SWITCHYARD_ISA),     copy,    {scale<F32>, sum<F32>, dot<F32>},
    {scale<Bf16>, sum<Bf16>, dot<Bf16>}, publish,
};

}  // namespace switchyard::cpu
