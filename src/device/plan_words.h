// The words in which devices and hosts speak of what went wrong, and of how a plan is laid out.
#pragma once

#include <cstdint>

namespace switchyard {

// [kProblemWords] i64: the first assignment that cannot be planned, and the first token that could
// not be routed; token −1: there is none.
constexpr std::int64_t kNonFiniteToken = 0;
constexpr std::int64_t kBadToken = 1;
constexpr std::int64_t kBadK = 2;
constexpr std::int64_t kBadId = 3;
constexpr std::int64_t kBadIsDuplicate = 4;  // 1: the token has picked it; 0: no expert has this id
constexpr std::int64_t kProblemWords = 5;

// [layout_words(ranks)] i64 of a plan: whether a rank overflows, then for each rank the rows its
// experts use, the rows that the routing asks for, the assignments dropped there, and the tokens
// that it has to receive (0 where lay_out is not told of distinct tokens).
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

// [kStepWords] i64 over the plans of a step: the most rows that any rank needed, the most tokens
// that any rank had to receive, then, if `kStepHasProblem` is 1, the first rank that had a problem
// in the first plan that had one, and its problem words. Zeros to begin with.
constexpr std::int64_t kStepMostNeeded = 0;
constexpr std::int64_t kStepMostTokens = 1;
constexpr std::int64_t kStepHasProblem = 2;
constexpr std::int64_t kStepProblemRank = 3;
constexpr std::int64_t kStepProblem = 4;
constexpr std::int64_t kStepWords = kStepProblem + kProblemWords;

}  // namespace switchyard
