// SPDX-License-Identifier: Apache-2.0
// The words in which devices report to hosts: problems with the routing, and the layout of a plan.
#pragma once

#include <cstdint>

namespace switchyard {

// [kProblemWords] i64: the first token that could not be routed, and the first assignment that
// cannot be planned. A token of −1 means that there is none.
constexpr std::int64_t kNonFiniteToken = 0;
constexpr std::int64_t kBadToken = 1;
constexpr std::int64_t kBadK = 2;
constexpr std::int64_t kBadId = 3;
constexpr std::int64_t kBadIsDuplicate = 4;  // 1: picked before by the token; 0: no such expert
constexpr std::int64_t kProblemWords = 5;

// [layout_words(ranks)] i64 of a plan. The first word is 1 if any rank overflows. Then come four
// words for each rank, stored by kind: the rows its experts use, the rows the routing needs, the
// assignments dropped there, and the tokens it has to receive (0 if lay_out gets no distinct
// tokens).
constexpr std::int64_t kOverflowWord = 0;
constexpr std::int64_t used_rows_word(std::int64_t /*ranks*/, std::int64_t rank) {
  return 1 + rank;
}
constexpr std::int64_t needed_rows_word(std::int64_t ranks, std::int64_t rank) {
  return 1 + ranks + rank;
}
constexpr std::int64_t dropped_word(std::int64_t ranks, std::int64_t rank) {
  return 1 + 2 * ranks + rank;
}
constexpr std::int64_t needed_tokens_word(std::int64_t ranks, std::int64_t rank) {
  return 1 + 3 * ranks + rank;
}
constexpr std::int64_t layout_words(std::int64_t ranks) { return 1 + 4 * ranks; }

// [kStepWords] i64 over all plans of a step, initially zero: the most rows that any rank needed and
// the most tokens that any rank had to receive. If `kStepHasProblem` is 1, the rest describes the
// first plan with a problem: its first rank with one, and that rank's problem words.
constexpr std::int64_t kStepMostNeeded = 0;
constexpr std::int64_t kStepMostTokens = 1;
constexpr std::int64_t kStepHasProblem = 2;
constexpr std::int64_t kStepProblemRank = 3;
constexpr std::int64_t kStepProblem = 4;
constexpr std::int64_t kStepWords = kStepProblem + kProblemWords;

}  // namespace switchyard
