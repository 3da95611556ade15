// SPDX-License-Identifier: Apache-2.0
// Cuts rows into pieces that are multiplied at once. Each choice depends only on sizes that are the
// same for any number of ranks and threads, so the bits are the same too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace switchyard::cpu {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// An expert's rows are cut into panels of nearly equal length, from the start of the group on.
constexpr std::int64_t kMostPanelRows = 256;
constexpr std::int64_t panel_rows(std::int64_t group_rows) {
  const auto panels = ceil_div(group_rows, kMostPanelRows);
  return panels == 0 ? 0 : round_up(ceil_div(group_rows, panels), 16);
}

// A rank's tokens are cut into panels of 64, the last one padded to 16, 48 or 64. A row gets the
// same bits at each of these lengths, so a token's bits do not depend on the other tokens. 32 is
// not among them: oneDNN's AVX2 kernels take six rows at a time and compute the last two
// differently.
constexpr std::int64_t kTokenPanelRows = 64;
constexpr std::int64_t padded_tokens(std::int64_t tokens) {
  const auto rows = round_up(tokens, 16);
  return rows == 32 ? 48 : rows;
}

// The gradient of a matrix is computed in blocks of its rows, each over all rows of the group.
constexpr std::int64_t kGradientBlockRows = 512;

}  // namespace switchyard::cpu
