// SPDX-License-Identifier: Apache-2.0
// The baseline: predicts a byte from the one before it.
#pragma once

#include <span>
#include <string_view>

namespace switchyard::train {

// Returns the mean −log p of every byte after the first of each window, under the bigrams of
// `training`, smoothed with its single-byte frequencies.
double bigram_loss(std::string_view training, std::span<const std::string_view> windows);

}  // namespace switchyard::train
