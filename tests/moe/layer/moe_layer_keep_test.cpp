// SPDX-License-Identifier: Apache-2.0
// The amount that a layer keeps for backward, and that bits do not depend on the choice.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "switchyard/run_ranks.h"

namespace switchyard::moe_layer_keep_test {
namespace {

using testing::backward;
using testing::expect_same_bits;
using testing::LayerAlone;
using testing::LayerGradients;
using testing::part_of;
using testing::Random;
using testing::same_bits;
using testing::small_layer_options;

class MoeLayerKeepTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(MoeLayerKeepTest, WhatIsKeptChangesNoBit) {
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    auto options = small_layer_options();
    options.dtype = GetParam();
    options.weight_stage = stage;
    options.shared_intermediate = 8;
    const Tensor x = Random(1).tensor({70, 20}, GetParam());
    const Tensor d_y = Random(2).tensor({70, 20}, GetParam());
    std::optional<LayerGradients> first;
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      options.keep = keep;
      LayerAlone alone(options, Biases::all);
      SavedForBackward saved;
      const Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
      EXPECT_TRUE(same_bits(alone.layer.forward(alone.weights, {.x = x}), y));  // inference
      LayerGradients g = backward(alone, saved, d_y);
      if (first) expect_same_bits(g, *first);
      if (!first) first = std::move(g);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MoeLayerKeepTest, ::testing::Values(Dtype::f32, Dtype::bf16));

TEST_P(MoeLayerKeepTest, ThreadsChangeNoBit) {
  auto options = small_layer_options();
  options.dtype = GetParam();
  options.shared_intermediate = 8;
  const Tensor x = Random(1).tensor({170, 20}, GetParam());
  const auto step = [&](int num_threads) {
    LayerAlone alone(options, Biases::all, Device::cpu({.num_threads = num_threads}));
    SavedForBackward saved;
    Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
    return std::pair(std::move(y), backward(alone, saved, x));
  };
  const auto one = step(1);
  const auto three = step(3);
  EXPECT_TRUE(same_bits(three.first, one.first));
  expect_same_bits(three.second, one.second);
}

// Two forwards before their backwards: what is saved is each step's own.
TEST(MoeLayerKeep, StepsMayOverlap) {
  LayerAlone alone(small_layer_options());
  const Tensor a = Random(1).tensor({30, 20}, Dtype::f32);
  const Tensor b = Random(2).tensor({50, 20}, Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = a}, saved);
  const auto expected = backward(alone, saved, a);
  SavedForBackward saved_b;
  (void)alone.layer.forward(alone.weights, {.x = a}, saved);
  (void)alone.layer.forward(alone.weights, {.x = b}, saved_b);
  (void)backward(alone, saved_b, b);
  expect_same_bits(backward(alone, saved, a), expected);
}

// After two steps memory is used again.
TEST(MoeLayerKeep, StepsTakeNoMoreMemory) {
  const Device device;
  auto options = small_layer_options();
  options.shared_intermediate = 8;
  LayerAlone alone(options, Biases::none, device);
  const Tensor x = Random(1).tensor({200, 20}, Dtype::f32);
  std::int64_t held = 0;
  for (int i = 0; i < 5; ++i) {
    SavedForBackward saved;
    (void)alone.layer.forward(alone.weights, {.x = x}, saved);
    (void)backward(alone, saved, x);
    if (i == 1) held = device.bytes_held();  // a first step finds out how much scratch it takes
  }
  EXPECT_EQ(device.bytes_held(), held);
}

// Tables of a plan, each padded to 128 bytes: what ranks report (problems, counts, distinct tokens,
// layout), and where groups lie.
std::int64_t padded(std::int64_t bytes) { return (bytes + 127) / 128 * 128; }
std::int64_t report_bytes(std::int64_t experts, std::int64_t ranks) {
  return padded(5 * 8) + padded(experts * 4) + padded(ranks * 4) + padded((1 + 4 * ranks) * 8);
}
std::int64_t groups_bytes(std::int64_t experts, std::int64_t local, std::int64_t ranks) {
  return 3 * padded(experts * 4) + padded((experts + 1) * 4) + padded((local + 1) * 4) +
         padded(local * 4) + padded(ranks * 4);
}

// On one rank: x, what the experts computed inside, and integers.
TEST(MoeLayerKeep, BytesAreWhatIsDocumented) {
  constexpr std::int64_t kT = 33, kK = 2, kH = 20, kI = 12, kE = 6;
  const std::int64_t routing = 2 * kT * kK * 4 + 5 * 8;  // ids and weights, and problems
  // Slots, targets, sources and those of rows.
  const std::int64_t plan = 4 * kT * kK * 4 + report_bytes(kE, 1) + groups_bytes(kE, kE, 1);
  const std::int64_t sums = (2 * kE + 1 + 2) * 8;  // picks, scores and tokens, and squares
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      for (const std::int64_t shared : {0, 5}) {
        auto options = small_layer_options();
        options.dtype = dtype;
        options.keep = keep;
        options.shared_intermediate = shared;
        LayerAlone alone(options);
        SavedForBackward saved;
        const Tensor x = Random(1).tensor({kT, kH}, dtype);
        (void)alone.layer.forward(alone.weights, {.x = x}, saved);
        const std::int64_t inner = keep == Keep::nothing ? 0 : kT * kK * 2 * kI + kT * 2 * shared;
        EXPECT_EQ(saved.bytes(), (kT * kH + inner) * size_of(dtype) + routing + plan + sums);
        EXPECT_EQ(saved.plan().num_tokens(), kT);
        EXPECT_EQ(saved.routing().weights.shape(), (Shape{kT, kK}));
        (void)backward(alone, saved, x);
        EXPECT_EQ(saved.bytes(), 0);
      }
    }
  }
}

TEST(MoeLayerKeep, ReceivedRowsCountAtSeveralRanks) {
  run_ranks(2, [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(6, 2);
    Random random(4);
    const auto weights =
        part_of(random_layer(random, small_layer_options(), Biases::none), placement, comm.rank());
    std::int64_t bytes[2]{};
    for (const auto keep : {Keep::activations, Keep::rows}) {
      auto options = small_layer_options();
      options.keep = keep;
      MoeLayer layer(comm, placement, options);
      SavedForBackward saved;
      (void)layer.forward(weights, {.x = Random(1).tensor({9, 20}, Dtype::f32)}, saved);
      bytes[keep == Keep::rows ? 1 : 0] = saved.bytes();
      EXPECT_EQ(bytes[1], keep == Keep::rows
                              ? bytes[0] + saved.plan().num_rows() * 20 * size_of(Dtype::f32)
                              : 0);
    }
  });
}

// A received token is kept once, however many of its experts are on this rank.
TEST(MoeLayerKeep, BytesInPeerMemoryAreWhatIsDocumented) {
  constexpr std::int64_t kT = 33, kK = 2, kH = 20, kI = 12, kE = 6, kRanks = 2;
  run_ranks(kRanks, [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(kE, kRanks);
    Random random(4);
    const auto weights =
        part_of(random_layer(random, small_layer_options(), Biases::none), placement, comm.rank());
    const Tensor x = Random(1).tensor({kT, kH}, Dtype::f32);
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(150, Overflow::fail, 80)}) {
        auto options = small_layer_options();
        options.mover = MoverKind::peer;
        options.keep = keep;
        options.sizing = sizing;
        MoeLayer layer(comm, placement, options);
        SavedForBackward saved;
        (void)layer.forward(weights, {.x = x}, saved);
        const Plan& plan = saved.plan();
        const bool bounded = sizing.is_bounded();
        const auto rows = bounded ? 150 : plan.num_rows();
        const auto received =
            bounded ? 80
                    : plan.distinct_tokens(0, comm.rank()) + plan.distinct_tokens(1, comm.rank());
        const auto values = kT * kH + (keep == Keep::rows ? received * kH : 0) +
                            (keep == Keep::nothing ? 0 : rows * 2 * kI);
        const auto beside = received * kK * 4 + rows * 4;  // weights, and sources of rows
        const auto routing = 2 * kT * kK * 4 + 5 * 8;
        // Slots, targets, sources, places and what rows are told; the headers of all ranks, too.
        const auto reports = padded(kRanks * (16 * 8 + report_bytes(kE, kRanks) - 128)) + 128;
        const auto tables = 5 * kT * kK * 4 + report_bytes(kE, kRanks) +
                            groups_bytes(kE, kE / kRanks, kRanks) + reports;
        const auto sums = (2 * kE + 1 + 2) * 8;
        EXPECT_EQ(saved.bytes(), values * 4 + beside + routing + tables + sums);
      }
    }
  });
}

}  // namespace
}  // namespace switchyard::moe_layer_keep_test
