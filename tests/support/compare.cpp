// SPDX-License-Identifier: Apache-2.0
#include "support/compare.h"

#include <cmath>
#include <cstring>

namespace switchyard::testing {
namespace {

double value_at(const ConstTensorView& view, std::int64_t row, std::int64_t column) {
  const std::byte* at = view.row(row) + column * size_of(view.dtype());
  const auto read = [&]<typename T>(T value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (view.dtype()) {
    case Dtype::f32:
      return read(0.0F);
    case Dtype::bf16:
      return to_float(read(Bfloat16{}));
    case Dtype::f16:
      return to_float(read(Float16{}));
    case Dtype::i32:
      return read(std::int32_t{0});
    case Dtype::i64:
      return static_cast<double>(read(std::int64_t{0}));
  }
  return 0.0;
}

}  // namespace

::testing::AssertionResult same_bits(const ConstTensorView& actual,
                                     const ConstTensorView& expected) {
  if (actual.dtype() != expected.dtype() || actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure()
           << name_of(actual.dtype()) << actual.shape().to_string() << " instead of "
           << name_of(expected.dtype()) << expected.shape().to_string();
  }
  const auto size = size_of(actual.dtype());
  for (std::int64_t r = 0; r < actual.rows(); ++r) {
    if (std::memcmp(actual.row(r), expected.row(r), static_cast<std::size_t>(actual.row_bytes())) ==
        0) {
      continue;
    }
    for (std::int64_t c = 0; c < actual.shape().row_elements(); ++c) {
      if (std::memcmp(actual.row(r) + c * size, expected.row(r) + c * size,
                      static_cast<std::size_t>(size)) != 0) {
        return ::testing::AssertionFailure()
               << "[" << r << "," << c << "] of " << actual.shape().to_string() << " is "
               << value_at(actual, r, c) << " instead of " << value_at(expected, r, c);
      }
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult near(const ConstTensorView& actual, const ConstTensorView& expected,
                                double tolerance) {
  if (actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure()
           << actual.shape().to_string() << " instead of " << expected.shape().to_string();
  }
  double difference = 0.0;
  double norm = 0.0;
  for (std::int64_t r = 0; r < actual.rows(); ++r) {
    for (std::int64_t c = 0; c < actual.shape().row_elements(); ++c) {
      const double a = value_at(actual, r, c);
      const double e = value_at(expected, r, c);
      difference += (a - e) * (a - e);
      norm += e * e;
    }
  }
  if (std::sqrt(difference) <= tolerance * std::sqrt(norm)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "relative error " << std::sqrt(difference / norm) << " exceeds " << tolerance;
}

::testing::AssertionResult within(const ConstTensorView& actual, const ConstTensorView& expected,
                                  double most) {
  if (actual.shape() != expected.shape()) {
    return ::testing::AssertionFailure()
           << actual.shape().to_string() << " instead of " << expected.shape().to_string();
  }
  for (std::int64_t r = 0; r < actual.rows(); ++r) {
    for (std::int64_t c = 0; c < actual.shape().row_elements(); ++c) {
      const double difference = std::abs(value_at(actual, r, c) - value_at(expected, r, c));
      if (!(difference <= most)) {
        return ::testing::AssertionFailure()
               << "[" << r << "," << c << "] is " << value_at(actual, r, c) << " instead of "
               << value_at(expected, r, c);
      }
    }
  }
  return ::testing::AssertionSuccess();
}

void poison(const TensorView& tensor) {
  for (std::int64_t r = 0; r < tensor.rows(); ++r) {
    std::memset(tensor.row(r), 0xff, static_cast<std::size_t>(tensor.row_bytes()));
  }
}

Tensor poisoned(const Shape& shape, Dtype dtype) {
  Tensor tensor(shape, dtype);
  poison(tensor);
  return tensor;
}

}  // namespace switchyard::testing
