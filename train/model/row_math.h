// SPDX-License-Identifier: Apache-2.0
// Loops over one row of floats that are fast on every CPU. Sums are kept in vector lanes, in an
// order that depends only on the row's length.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "switchyard/tensor.h"

namespace switchyard::train {

inline float* row_of(const TensorView& view, std::int64_t row) {
  return reinterpret_cast<float*>(view.row(row));
}
inline const float* row_of(const ConstTensorView& view, std::int64_t row) {
  return reinterpret_cast<const float*>(view.row(row));
}

// Returns eˣ for x ≤ 0, accurate to one or two units in the last place. Returns 0 below −87, where
// normal floats end. NaN stays NaN.
inline float exp_of_negative(float x) {
  constexpr float kLeast = -87.0F;
  constexpr float kToInteger = 12582912.0F;  // adding 1.5·2²³ rounds to an integer
  const float bounded = x < kLeast ? kLeast : x;
  const float shifted = bounded * 1.44269504F + kToInteger;
  const float n = shifted - kToInteger;
  const float r = (bounded - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const auto exponent = std::bit_cast<std::int32_t>(shifted) - 0x4b400000;
  const float power = std::bit_cast<float>((exponent + 127) << 23);
  return x < kLeast ? 0.0F : p * power;
}

// A vector of four floats, which every CPU processes at once.
using Lanes = float __attribute__((vector_size(16)));
constexpr std::int64_t kLanes = 4;

inline Lanes lanes_at(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// Reduces term(i, at) over i in 0 … n − 1 with `join`. `at` loads either Lanes or one float from a
// pointer.
template <typename Term, typename Join>
float reduce(std::int64_t n, float begin, const Term& term, const Join& join) {
  constexpr std::int64_t kSums = 4;  // independent accumulators, to hide the latency of each
  std::array<Lanes, kSums> sums;
  sums.fill(Lanes{begin, begin, begin, begin});
  const auto lanes = [](const float* from) { return lanes_at(from); };
  std::int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
    for (std::int64_t s = 0; s < kSums; ++s) {
      auto& sum = sums[static_cast<std::size_t>(s)];
      sum = join(sum, term(i + s * kLanes, lanes));
    }
  }
  const Lanes all = join(join(sums[0], sums[1]), join(sums[2], sums[3]));
  float result = join(join(all[0], all[1]), join(all[2], all[3]));
  const auto single = [](const float* from) { return *from; };
  for (; i < n; ++i) result = join(result, term(i, single));
  return result;
}

constexpr auto kAdd = [](auto a, auto b) { return a + b; };

inline float sum_of(const float* a, std::int64_t n) {
  return reduce(
      n, 0.0F, [&](std::int64_t i, const auto& at) { return at(a + i); }, kAdd);
}
inline float dot_of(const float* a, const float* b, std::int64_t n) {
  return reduce(
      n, 0.0F, [&](std::int64_t i, const auto& at) { return at(a + i) * at(b + i); }, kAdd);
}
// Σ a · b · c
inline float dot_of(const float* a, const float* b, const float* c, std::int64_t n) {
  return reduce(
      n, 0.0F, [&](std::int64_t i, const auto& at) { return at(a + i) * at(b + i) * at(c + i); },
      kAdd);
}
// Returns the largest of n > 0 values.
inline float max_of(const float* a, std::int64_t n) {
  return reduce(
      n, a[0], [&](std::int64_t i, const auto& at) { return at(a + i); },
      [](auto x, auto y) { return x < y ? y : x; });
}

struct ExpRow {
  float largest = 0.0F;  // maximum of the original row
  float sum = 0.0F;      // sum of the new row
};
// Replaces row[i] by exp(scale · (row[i] − largest)). Requires n > 0 and scale > 0.
inline ExpRow exp_row(float* row, std::int64_t n, float scale) {
  const float largest = max_of(row, n);
  for (std::int64_t i = 0; i < n; ++i) row[i] = exp_of_negative((row[i] - largest) * scale);
  return {largest, sum_of(row, n)};
}

}  // namespace switchyard::train
