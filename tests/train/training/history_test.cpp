// SPDX-License-Identifier: Apache-2.0
// A history stays small however long the run, and its totals stay right.
#include "training/history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "checkpoints/history_tensors.h"

namespace switchyard::history_test {
namespace {

using train::History;
using train::LoadRecord;
using train::StepRecord;

constexpr std::int64_t kSteps = 100'000;
const train::ModelConfig kConfig{.layers = 1, .experts = 2};

void add_step(History& history, std::int64_t step) {
  const auto x = static_cast<double>(step);
  history.add(StepRecord{.step = step,
                         .loss = x,
                         .seconds = 1.0 + std::sin(x),
                         .tokens_per_second = 1000.0 / (1.0 + std::sin(x)),
                         .bytes_moved = 64,
                         .ran_again = step % 1000 == 0 ? 1 : 0});
  history.add(train::HeldOutRecord{step, x});
  history.add(LoadRecord{step, {{1, step}}});
}

void expect_totals(const History& history) {
  EXPECT_EQ(history.num_steps(), kSteps);
  double seconds = 0.0;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    seconds += 1.0 + std::sin(static_cast<double>(step));
  }
  EXPECT_NEAR(history.seconds() / seconds, 1.0, 1e-9);
  double losses = 0.0;
  double tokens = 0.0;
  std::int64_t again = 0;
  history.for_each_step_record([&](const StepRecord& record, double num_steps) {
    losses += record.loss * num_steps;
    tokens += record.tokens_per_second * record.seconds * num_steps;
    EXPECT_EQ(record.bytes_moved, 64);
    again += record.ran_again;
  });
  EXPECT_NEAR(losses / (0.5 * kSteps * (kSteps + 1.0)), 1.0, 1e-9);
  EXPECT_NEAR(tokens / (1000.0 * kSteps), 1.0, 1e-9);
  EXPECT_EQ(again, kSteps / 1000);
  std::int64_t picks = 0;
  for (const auto& record : history.loads) picks += record.picks[0][1];
  EXPECT_EQ(picks, kSteps * (kSteps + 1) / 2);
}

TEST(History, IsFlatOverAHundredThousandSteps) {
  History history;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    add_step(history, step);
    ASSERT_LE(history.steps.size(), History::kMostSteps);
    ASSERT_LE(history.held_out.size(), History::kMostHeldOut);
    ASSERT_LE(history.loads.size(), History::kMostLoads);
  }
  EXPECT_GE(history.steps.size(), History::kMostSteps / 2);
  EXPECT_GE(history.loads.size(), History::kMostLoads / 2);
  EXPECT_EQ(history.held_out.back().step, kSteps);
  EXPECT_EQ(history.loads.back().step, kSteps);
  expect_totals(history);
  train::require_sound(history, kSteps);
}

TEST(History, OfAResumedRunIsThatOfOneThatWentOn) {
  History whole;
  History resumed;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    add_step(whole, step);
    add_step(resumed, step);
    if (step % 30'001 == 0) resumed = history_from(to_tensors(resumed, kConfig), kConfig);
  }
  const auto a = to_tensors(whole, kConfig);
  const auto b = to_tensors(resumed, kConfig);
  for (const auto& [name, tensor] : a) {
    const auto expected = tensor.span<std::int64_t>();
    const auto actual = b.at(name).span<std::int64_t>();
    EXPECT_TRUE(std::ranges::equal(expected, actual)) << name;
  }
}

// As versions before had it: one record a step, however many.
TEST(History, ThatIsTooLongShrinksWithItsNextRecord) {
  History history;
  for (std::int64_t step = 1; step < kSteps; ++step) {
    history.steps.push_back({.step = step, .seconds = 2.0});
  }
  history.add(StepRecord{.step = kSteps, .seconds = 2.0});
  EXPECT_LE(history.steps.size(), History::kMostSteps);
  EXPECT_EQ(history.num_steps(), kSteps);
  EXPECT_NEAR(history.seconds(), 2.0 * kSteps, 1e-6);
}

}  // namespace
}  // namespace switchyard::history_test
