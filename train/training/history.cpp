// SPDX-License-Identifier: Apache-2.0
#include "training/history.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace switchyard::train {
namespace {

constexpr double kMostBytes = 9e18;  // that an integer holds; a checkpoint may hold any number

// The weighted mean of a value over two records.
struct Mean {
  double first_share;

  double operator()(double first, double second) const {
    return first_share * first + (1.0 - first_share) * second;
  }
};

double share_of(double first, double second) {
  return first + second > 0.0 ? first / (first + second) : 0.5;
}

// `before` is the last step before `a`.
StepRecord merged(const StepRecord& a, const StepRecord& b, std::int64_t before) {
  const auto steps_a = static_cast<double>(a.step - before);
  const auto steps_b = static_cast<double>(b.step - a.step);
  const Mean by_step{share_of(steps_a, steps_b)};
  const Mean by_time{share_of(a.seconds * steps_a, b.seconds * steps_b)};
  return {.step = b.step,
          .loss = by_step(a.loss, b.loss),
          .balance_loss = by_step(a.balance_loss, b.balance_loss),
          .z_loss = by_step(a.z_loss, b.z_loss),
          .learning_rate = static_cast<float>(by_step(a.learning_rate, b.learning_rate)),
          .gradient_norm = by_step(a.gradient_norm, b.gradient_norm),
          .seconds = by_step(a.seconds, b.seconds),
          .tokens_per_second = by_time(a.tokens_per_second, b.tokens_per_second),
          .balance = by_step(a.balance, b.balance),
          .gemm_share = by_step(a.gemm_share, b.gemm_share),
          .moe_seconds = by_step(a.moe_seconds, b.moe_seconds),
          .moe_gflops = by_step(a.moe_gflops, b.moe_gflops),
          .bytes_moved = std::llround(std::clamp(
              by_step(static_cast<double>(a.bytes_moved), static_cast<double>(b.bytes_moved)), 0.0,
              kMostBytes)),
          .ran_again = a.ran_again + b.ran_again};
}

HeldOutRecord merged(const HeldOutRecord& /*a*/, const HeldOutRecord& b, std::int64_t /*before*/) {
  return b;
}

ResumeRecord merged(const ResumeRecord& /*a*/, const ResumeRecord& b, std::int64_t /*before*/) {
  return b;
}

LoadRecord merged(const LoadRecord& a, LoadRecord b, std::int64_t /*before*/) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  for (std::size_t l = 0; l < b.picks.size(); ++l) {
    for (std::size_t e = 0; e < b.picks[l].size(); ++e) {
      std::int64_t& sum = b.picks[l][e];
      const auto more = a.picks[l][e];
      sum = more > kMost - sum ? kMost : sum + more;  // a checkpoint may hold any numbers
    }
  }
  return b;
}

template <typename Record>
void add_to(std::vector<Record>& records, const Record& record, std::size_t most) {
  records.push_back(record);
  while (records.size() > most) {
    std::vector<Record> fewer;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < records.size(); i += 2) {
      const bool is_last = i + 1 == records.size();
      fewer.push_back(is_last ? records[i] : merged(records[i], records[i + 1], before));
      before = fewer.back().step;
    }
    records = std::move(fewer);
  }
}

}  // namespace

void History::add(const StepRecord& record) { add_to(steps, record, kMostSteps); }
void History::add(const HeldOutRecord& record) { add_to(held_out, record, kMostHeldOut); }
void History::add(const LoadRecord& record) { add_to(loads, record, kMostLoads); }
void History::add(const ResumeRecord& record) { add_to(resumes, record, kMostResumes); }

std::int64_t History::num_steps() const { return steps.empty() ? 0 : steps.back().step; }

double History::seconds() const {
  double seconds = 0.0;
  for_each_step_record(
      [&](const StepRecord& record, double num_steps) { seconds += record.seconds * num_steps; });
  return seconds;
}

}  // namespace switchyard::train
