// SPDX-License-Identifier: Apache-2.0
#include "data/bigram.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace switchyard::train {
namespace {

constexpr std::size_t kBytes = 256;
// The weight of the single-byte prior, in bigrams; the loss hardly depends on it.
constexpr double kPrior = 8.0;

class Bigrams {
 public:
  explicit Bigrams(std::string_view text) : pairs_(kBytes * kBytes) {
    for (const char c : text) ++singles_[index(c)];
    for (std::size_t i = 1; i < text.size(); ++i) {
      ++pairs_[index(text[i - 1]) * kBytes + index(text[i])];
      ++before_[index(text[i - 1])];
    }
    total_ = static_cast<double>(text.size());
  }

  double probability(char before, char after) const {
    const auto a = index(before);
    const auto b = index(after);
    const double single = (count(singles_[b]) + 1.0) / (total_ + static_cast<double>(kBytes));
    return (count(pairs_[a * kBytes + b]) + kPrior * single) / (count(before_[a]) + kPrior);
  }

 private:
  static std::size_t index(char c) { return static_cast<unsigned char>(c); }
  static double count(std::int64_t n) { return static_cast<double>(n); }

  std::array<std::int64_t, kBytes> singles_{};
  std::array<std::int64_t, kBytes> before_{};
  std::vector<std::int64_t> pairs_;  // [before, after]
  double total_ = 0.0;
};

}  // namespace

double bigram_loss(std::string_view training, std::span<const std::string_view> windows) {
  const Bigrams bigrams(training);
  double sum = 0.0;
  std::int64_t num_bytes = 0;
  for (const auto window : windows) {
    for (std::size_t i = 1; i < window.size(); ++i) {
      sum -= std::log(bigrams.probability(window[i - 1], window[i]));
      ++num_bytes;
    }
  }
  return sum / static_cast<double>(num_bytes);
}

}  // namespace switchyard::train
