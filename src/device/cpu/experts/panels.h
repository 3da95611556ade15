// How rows are cut into pieces that are multiplied at once. Each choice is a function of sizes that
// do not depend on ranks or threads, so neither do the bits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace switchyard::cpu {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// An expert's rows: panels of nearly equal length, counted from the group's start.
constexpr std::int64_t kMostPanelRows = 256;
constexpr std::int64_t panel_rows(std::int64_t group_rows) {
  const auto panels = ceil_div(group_rows, kMostPanelRows);
  return panels == 0 ? 0 : round_up(ceil_div(group_rows, panels), 16);
}

// A rank's tokens: panels of 64, the last one padded to 16, 48 or 64. A row gets the same bits from
// each of these lengths, so a token's bits do not depend on how many are with it. 32 is not one of
// them: oneDNN for AVX2 takes six rows at a time, and two that are left over another way.
constexpr std::int64_t kTokenPanelRows = 64;
constexpr std::int64_t padded_tokens(std::int64_t tokens) {
  const auto rows = round_up(tokens, 16);
  return rows == 32 ? 48 : rows;
}

// Gradients of matrices: blocks of rows of the matrix, over all rows of the group at once.
constexpr std::int64_t kGradientBlockRows = 512;

}  // namespace switchyard::cpu
