// A history comes back from a checkpoint to the last bit.
#include "checkpoints/history_tensors.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/errors.h"
#include "support/folder.h"
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
                           .ran_again = true});
  history.steps.push_back({.step = 2, .loss = 0.2});
  history.held_out.push_back({.step = 2, .loss = 1.0 / 7.0});
  history.loads.push_back({.step = 2, .picks = {{1, 2, 3}, {4, 5, 6}}});
  return history;
}

class HistoryTensors : public ::testing::Test {
 protected:
  Checkpoint saved(const std::map<std::string, Tensor>& tensors) const {
    CheckpointContents contents;
    for (const auto& [name, tensor] : tensors) contents.tensors.emplace(name, tensor.view());
    save_checkpoint(*alone_, folder_ / "x.safetensors", contents);
    return Checkpoint::open(folder_ / "x.safetensors");
  }
  std::string error_of(const std::map<std::string, Tensor>& tensors) const {
    return testing::error_of<InvalidArgument>([&] { history_from(saved(tensors), kConfig); });
  }

  const testing::Folder folder_;
  const std::unique_ptr<Communicator> alone_ = connect();
};

TEST_F(HistoryTensors, EveryFieldComesBack) {
  const auto before = some_history();
  const auto after = history_from(saved(to_tensors(before, kConfig)), kConfig);
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
  EXPECT_FALSE(after.steps[1].ran_again);
  ASSERT_EQ(after.held_out.size(), 1U);
  EXPECT_EQ(after.held_out[0].step, 2);
  EXPECT_EQ(after.held_out[0].loss, 1.0 / 7.0);
  ASSERT_EQ(after.loads.size(), 1U);
  EXPECT_EQ(after.loads[0].step, 2);
  EXPECT_EQ(after.loads[0].picks, before.loads[0].picks);
}

TEST_F(HistoryTensors, AnEmptyOneIsOneToo) {
  const auto after = history_from(saved(to_tensors({}, kConfig)), kConfig);
  EXPECT_TRUE(after.steps.empty());
  EXPECT_TRUE(after.held_out.empty());
  EXPECT_TRUE(after.loads.empty());
}

TEST_F(HistoryTensors, WhatDoesNotFitIsNamed) {
  auto tensors = to_tensors(some_history(), kConfig);
  tensors["history.loads"] = Tensor::zeros({1, 6}, Dtype::i64);
  EXPECT_EQ(error_of(tensors), "history.loads is i64 [1,6], but must be i64 [1,7]");
  tensors["history.held_out"] = Tensor::zeros({1, 2}, Dtype::f32);
  EXPECT_EQ(error_of(tensors), "history.held_out is f32 [1,2], but must be i64 [1,2]");
  tensors.erase("history.steps");
  EXPECT_NE(error_of(tensors).find("has no tensor 'history.steps'"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::train::history_tensors_test
