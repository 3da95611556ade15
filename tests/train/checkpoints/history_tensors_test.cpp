// SPDX-License-Identifier: Apache-2.0
// A history comes back from tensors to the last bit.
#include "checkpoints/history_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::train::history_tensors_test {
namespace {

const ModelConfig kConfig{.layers = 4, .experts = 3, .moe_every = 2};  // two layers have experts

History some_history() {
  History history;
  history.steps.push_back({.step = 1,
                           .loss = 1.0 / 3.0,
                           .balance_loss = -0.0,
                           .z_loss = std::numeric_limits<double>::denorm_min(),
                           .learning_rate = -0.1F,
                           .gradient_norm = std::numeric_limits<double>::infinity(),
                           .seconds = 0.1,
                           .tokens_per_second = 1e300,
                           .balance = 1.7,
                           .gemm_share = 0.3,
                           .moe_seconds = 0.7,
                           .moe_gflops = 12.3,
                           .bytes_moved = std::int64_t{1} << 60,
                           .ran_again = 1});
  history.steps.push_back({.step = 2, .loss = 0.2});
  history.held_out.push_back({.step = 2, .loss = 1.0 / 7.0});
  history.loads.push_back({.step = 2, .picks = {{1, 2, 3}, {4, 5, 6}}});
  history.resumes.push_back({.step = 1, .time = 1'795'000'000});
  return history;
}

std::string error_of(const std::map<std::string, Tensor>& tensors) {
  return testing::error_of<InvalidArgument>([&] { history_from(tensors, kConfig); });
}

TEST(HistoryTensors, EveryFieldComesBack) {
  const auto before = some_history();
  const auto after = history_from(to_tensors(before, kConfig), kConfig);
  ASSERT_EQ(after.steps.size(), 2U);
  const auto& a = before.steps[0];
  const auto& b = after.steps[0];
  EXPECT_EQ(b.step, a.step);
  EXPECT_EQ(b.loss, a.loss);
  EXPECT_TRUE(std::signbit(b.balance_loss));
  EXPECT_EQ(b.z_loss, a.z_loss);
  EXPECT_EQ(b.learning_rate, a.learning_rate);
  EXPECT_EQ(b.gradient_norm, a.gradient_norm);
  EXPECT_EQ(b.seconds, a.seconds);
  EXPECT_EQ(b.tokens_per_second, a.tokens_per_second);
  EXPECT_EQ(b.balance, a.balance);
  EXPECT_EQ(b.gemm_share, a.gemm_share);
  EXPECT_EQ(b.moe_seconds, a.moe_seconds);
  EXPECT_EQ(b.moe_gflops, a.moe_gflops);
  EXPECT_EQ(b.bytes_moved, a.bytes_moved);
  EXPECT_EQ(b.ran_again, a.ran_again);
  EXPECT_EQ(after.steps[1].loss, 0.2);
  EXPECT_EQ(after.steps[1].ran_again, 0);
  ASSERT_EQ(after.held_out.size(), 1U);
  EXPECT_EQ(after.held_out[0].step, 2);
  EXPECT_EQ(after.held_out[0].loss, 1.0 / 7.0);
  ASSERT_EQ(after.loads.size(), 1U);
  EXPECT_EQ(after.loads[0].step, 2);
  EXPECT_EQ(after.loads[0].picks, before.loads[0].picks);
  ASSERT_EQ(after.resumes.size(), 1U);
  EXPECT_EQ(after.resumes[0].step, 1);
  EXPECT_EQ(after.resumes[0].time, 1'795'000'000);
}

TEST(HistoryTensors, AnEmptyHistoryComesBack) {
  const auto after = history_from(to_tensors({}, kConfig), kConfig);
  EXPECT_TRUE(after.steps.empty());
  EXPECT_TRUE(after.held_out.empty());
  EXPECT_TRUE(after.loads.empty());
}

TEST(HistoryTensors, ACheckpointOfVersion01HasNoResumes) {
  auto tensors = to_tensors(some_history(), kConfig);
  tensors.erase("history.resumes");
  const auto after = history_from(tensors, kConfig);
  EXPECT_TRUE(after.resumes.empty());
  EXPECT_EQ(after.steps.size(), 2U);
}

TEST(HistoryTensors, WhatDoesNotFitIsNamed) {
  auto tensors = to_tensors(some_history(), kConfig);
  tensors["history.resumes"] = Tensor::zeros({1, 3}, Dtype::i64);
  EXPECT_EQ(error_of(tensors), "history.resumes is i64 [1,3], but must be i64 [1,2]");
  tensors["history.loads"] = Tensor::zeros({1, 6}, Dtype::i64);
  EXPECT_EQ(error_of(tensors), "history.loads is i64 [1,6], but must be i64 [1,7]");
  tensors["history.held_out"] = Tensor::zeros({1, 2}, Dtype::f32);
  EXPECT_EQ(error_of(tensors), "history.held_out is f32 [1,2], but must be i64 [1,2]");
  tensors.erase("history.steps");
  EXPECT_EQ(error_of(tensors), "there is no tensor history.steps");
}

TEST(History, IsInOrderAndUpToTheStep) {
  const auto error = [](std::vector<StepRecord> steps, std::vector<HeldOutRecord> held_out,
                        std::vector<LoadRecord> loads, std::vector<ResumeRecord> resumes = {}) {
    const History history{std::move(steps), std::move(held_out), std::move(loads),
                          std::move(resumes)};
    return testing::error_of<InvalidArgument>([&] { require_sound(history, 7); });
  };
  EXPECT_EQ(error({{.step = 1}, {.step = 7}}, {{7, 1.0}, {7, 1.0}}, {{7, {{0, 1}}}}), "no error");
  EXPECT_EQ(error({{.step = 2}, {.step = 1}}, {}, {}),
            "history.steps has a record of step 1 after one of 2, in a run of 7 steps");
  EXPECT_EQ(error({}, {{-1, 1.0}}, {}),
            "history.held_out has a record of step -1 after one of 0, in a run of 7 steps");
  EXPECT_EQ(error({}, {}, {{8, {}}}),
            "history.loads has a record of step 8 after one of 0, in a run of 7 steps");
  EXPECT_EQ(error({}, {}, {{3, {{0, 1}, {2, -4}}}}),
            "history.loads has -4 picks of an expert at step 3");
  EXPECT_EQ(error({}, {}, {}, {{.step = 8, .time = 1}}),
            "history.resumes has a record of step 8 after one of 0, in a run of 7 steps");
}

}  // namespace
}  // namespace switchyard::train::history_tensors_test
