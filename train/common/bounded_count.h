// Counts of things that options ask for, which may be more than a number can hold.
#pragma once

#include <cstdint>
#include <limits>

namespace switchyard::train {

// Not negative. Sums and products beyond the largest number are the largest number.
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
