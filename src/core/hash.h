// One number for many, so that ranks can compare what is too long to send.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <type_traits>

namespace switchyard {

// FNV-1a, a number at a time.
template <std::integral T>
std::int64_t hash_of(std::span<const T> values) {
  std::uint64_t hash = 1469598103934665603U;
  for (const T value : values) {
    hash = (hash ^ static_cast<std::make_unsigned_t<T>>(value)) * 1099511628211U;
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace switchyard
