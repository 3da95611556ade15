// SPDX-License-Identifier: Apache-2.0
// Decides which windows of a text are seen, and when.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "data/corpus.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

// The finalizer of SplitMix64: every bit of x flips about half of the bits of the result.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

// Returns the image of i under a permutation of 0 … n − 1. A Feistel network permutes numbers with
// an even number of bits; it is applied until the result is below n.
std::uint64_t permuted(std::uint64_t i, std::uint64_t n, std::uint64_t key) {
  const auto half = static_cast<unsigned>(std::bit_width(n - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = i >> half;
    std::uint64_t right = i & mask;
    for (std::uint64_t round = 0; round < 6; ++round) {
      const auto next = left ^ (mix(mix(key + round) ^ right) & mask);
      left = right;
      right = next;
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}

// Returns the number of windows in a text. A window is followed by the byte that its last one
// predicts.
std::int64_t windows_of(std::string_view text, std::int64_t length, std::string_view what) {
  const auto size = static_cast<std::int64_t>(text.size());
  if (length >= 1 && size > length) return (size - 1) / length;
  throw InvalidArgument(
      fmt::format("the corpus has {} bytes {}, but a context of {} needs at least {}; use more "
                  "text or a smaller --context",
                  size, what, length, length + 1));
}

}  // namespace

WindowOrder::WindowOrder(std::string_view text, std::int64_t length, std::uint64_t seed)
    : text_(text),
      length_(length),
      seed_(seed),
      num_windows_(windows_of(text, length, "to train on")) {}

std::string_view WindowOrder::window(std::int64_t n) const {
  if (n < 0) throw InvalidArgument(fmt::format("there is no window {}", n));
  const auto epoch = static_cast<std::uint64_t>(n / num_windows_);
  const auto key = mix(mix(seed_) ^ epoch);
  const auto i = permuted(static_cast<std::uint64_t>(n % num_windows_),
                          static_cast<std::uint64_t>(num_windows_), key);
  return text_.substr(i * static_cast<std::size_t>(length_), static_cast<std::size_t>(length_) + 1);
}

std::vector<std::string_view> held_out_windows(std::string_view text, std::int64_t length,
                                               std::int64_t most) {
  windows_of(text, length, "held out");
  const auto size = static_cast<std::size_t>(length) + 1;
  const auto available = text.size() / size;
  const auto count = std::min(available, static_cast<std::size_t>(most));
  std::vector<std::string_view> windows;
  for (std::size_t i = 0; i < count; ++i) {
    windows.push_back(text.substr(i * available / count * size, size));
  }
  return windows;
}

}  // namespace switchyard::train
