// SPDX-License-Identifier: Apache-2.0
// Hashes, so that ranks can compare values that are too long to send.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "switchyard/tensor.h"

namespace switchyard {

// FNV-1a over whole numbers instead of bytes.
template <std::integral T>
std::int64_t hash_of(std::span<const T> values) {
  std::uint64_t hash = 1469598103934665603U;
  for (const T value : values) {
    hash = (hash ^ static_cast<std::make_unsigned_t<T>>(value)) * 1099511628211U;
  }
  return static_cast<std::int64_t>(hash);
}

// Hashes the dtype, the rank and the extents from `first_dim` on of each tensor.
inline std::int64_t hash_of_shapes(std::span<const ConstTensorView> tensors, int first_dim = 0) {
  std::vector<std::int64_t> numbers;
  for (const auto& tensor : tensors) {
    numbers.push_back(static_cast<std::int64_t>(tensor.dtype()));
    numbers.push_back(tensor.shape().rank());
    for (int i = first_dim; i < tensor.shape().rank(); ++i) numbers.push_back(tensor.shape()[i]);
  }
  return hash_of(std::span<const std::int64_t>(numbers));
}

}  // namespace switchyard
