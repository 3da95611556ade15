// SPDX-License-Identifier: Apache-2.0
// Random numbers that depend only on a seed and an index.
#pragma once

#include <cstdint>
#include <string_view>

namespace switchyard::train {

// Returns the index-th random number of a seed.
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

// Returns a number in [0, 1).
constexpr double random_unit(std::uint64_t seed, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, index) >> 11) * 0x1p-53;
}

// Derives the seed for `name`.
constexpr std::uint64_t seed_of(std::string_view name, std::uint64_t seed) {
  std::uint64_t result = random_bits(seed, 0);
  for (const char c : name) result = random_bits(result, static_cast<unsigned char>(c));
  return result;
}

}  // namespace switchyard::train
