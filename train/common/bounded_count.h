// SPDX-License-Identifier: Apache-2.0
// Counts derived from options, which may exceed the range of an integer.
#pragma once

#include <cstdint>
#include <limits>

namespace switchyard::train {

// A count that is not negative. Sums and products saturate at the largest std::int64_t.
class BoundedCount {
 public:
  constexpr BoundedCount(std::int64_t value) : value_(value) {}  // NOLINT: it stands for a number

  constexpr std::int64_t value() const { return value_; }

  friend constexpr BoundedCount operator+(BoundedCount a, BoundedCount b) {
    std::int64_t sum = 0;
    return __builtin_add_overflow(a.value_, b.value_, &sum) ? kMost : sum;
  }
  friend constexpr BoundedCount operator*(BoundedCount a, BoundedCount b) {
    std::int64_t product = 0;
    return __builtin_mul_overflow(a.value_, b.value_, &product) ? kMost : product;
  }
  constexpr BoundedCount& operator+=(BoundedCount other) { return *this = *this + other; }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

  std::int64_t value_;
};

}  // namespace switchyard::train
