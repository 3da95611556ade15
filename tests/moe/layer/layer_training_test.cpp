// SPDX-License-Identifier: Apache-2.0
// Losses, capacity, scale and padding together: threads, dtypes, and what may disturb each other.
#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/run_ranks.h"

namespace switchyard::layer_training_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::gradients_for;
using testing::LayerAlone;
using testing::movers_of;
using testing::near;
using testing::on_all;
using testing::on_ranks;
using testing::part_of;
using testing::poison;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;

struct Results {
  Tensor y = {};
  Tensor d_x = {};
  Tensor d_gate = {};
  RouterLosses losses = {};
};

Results train(MoeLayer& layer, const MoeWeights& weights, const LayerInput& in,
              const ConstTensorView& d_y) {
  const auto& options = layer.options();
  SavedForBackward saved;
  Results results{.y = layer.forward(weights, in, saved)};
  results.losses = saved.losses();
  results.d_x = Tensor(in.x.shape(), options.dtype);
  const auto gradients = gradients_for(weights);
  const bool is_balanced = options.losses.balance != BalanceLoss::none;
  layer.backward(
      weights, saved,
      {.d_y = d_y,
       .d_losses = {.balance = is_balanced ? 0.7F : 0.0F, .z = options.losses.z ? 0.3F : 0.0F}},
      {.d_x = results.d_x, .gradients = gradients});
  results.d_gate = copy_of(gradients.router.gate);
  return results;
}

Results train_alone(const MoeLayerOptions& options, const LayerInput& in, const Tensor& d_y,
                    const Device& device = {}, Biases biases = Biases::none) {
  LayerAlone alone(options, biases, device);
  return train(alone.layer, alone.weights, in, d_y);
}

void expect_same(const Results& actual, const Results& expected) {
  EXPECT_TRUE(same_bits(actual.y, expected.y));
  EXPECT_TRUE(same_bits(actual.d_x, expected.d_x));
  EXPECT_TRUE(same_bits(actual.d_gate, expected.d_gate));
  EXPECT_EQ(actual.losses.balance, expected.losses.balance);
  EXPECT_EQ(actual.losses.z, expected.losses.z);
}

TEST(LayerTraining, HasTheSameBitsOnAnyNumberOfThreads) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto balance : {BalanceLoss::batch, BalanceLoss::sequence}) {
      auto options = small_layer_options();
      options.dtype = dtype;
      options.losses = {.balance = balance, .z = true};
      options.gradient_scale = GradientScale::global;
      options.capacity.factor = 0.8;
      const Tensor x = Random(3).tensor({1000, 20}, dtype);
      const Tensor d_y = Random(4).tensor({1000, 20}, dtype);
      const LayerInput in{.x = x, .sequence = SequenceShard(40, 25, 1, 0)};
      const auto one = train_alone(options, in, d_y);
      for (const int threads : {2, 4}) {
        expect_same(train_alone(options, in, d_y, Device::cpu({.num_threads = threads})), one);
      }
    }
  }
}

TEST(LayerTraining, LossesStayFiniteWhateverTheLogits) {
  for (const auto& router : {RouterOptions::mixtral(6, 2), RouterOptions::torchtitan(6, 2)}) {
    for (const float size : {0.0F, 1e4F, 1e7F, 1e18F, 1e37F}) {
      for (const auto scores : {LossScores::as_routed, LossScores::shares}) {
        auto options = small_layer_options();
        options.router = router;
        options.losses = {.balance = BalanceLoss::batch, .scores = scores, .z = true};
        Tensor x = Random(3).tensor({33, 20}, Dtype::f32);
        for (float& v : x.span<float>()) v *= size;
        const auto losses =
            train_alone(options, {.x = x}, Tensor::zeros({33, 20}, Dtype::f32)).losses;
        EXPECT_TRUE(std::isfinite(losses.balance)) << size;
        EXPECT_LE(losses.z, 0x1p40F) << size;
      }
    }
  }
}

TEST(LayerTraining, OneExpertAndNoTokens) {
  auto options = small_layer_options();
  options.router = RouterOptions::mixtral(1, 1);
  options.losses = {.balance = BalanceLoss::batch, .z = true};
  const Tensor x = Random(3).tensor({9, 20}, Dtype::f32);
  EXPECT_FLOAT_EQ(train_alone(options, {.x = x}, x.clone()).losses.balance, 1.0F);
  const Tensor none({0, 20}, Dtype::f32);
  EXPECT_EQ(train_alone(options, {.x = none}, none).losses.balance, 0.0F);
  options.losses.balance = BalanceLoss::sequence;
  for (const auto& shard : {SequenceShard(0, 5, 1, 0), SequenceShard(5, 0, 1, 0)}) {
    const auto losses = train_alone(options, {.x = none, .sequence = shard}, none).losses;
    EXPECT_EQ(losses.balance, 0.0F);
    EXPECT_EQ(losses.z, 0.0F);
  }
}

// In a bounded plan a token that cannot be routed is as padding is; one sequence is all padding.
TEST(LayerTraining, TokensThatCannotBeRoutedAreAsPadding) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const Keep keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      auto options = small_layer_options();
      options.dtype = dtype;
      options.keep = keep;
      options.sizing = Sizing::bounded(128);
      options.losses = {.balance = BalanceLoss::sequence, .z = true};
      options.gradient_scale = GradientScale::rank;
      options.capacity = {.factor = 0.8, .rule = CapacityRule::highest_weight};
      const Tensor valid = Tensor::from<std::int32_t>({12}, {1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0});
      Tensor x = Random(3).tensor({12, 20}, dtype);
      Tensor d_y = Random(4).tensor({12, 20}, dtype);
      const SequenceShard shard(2, 6, 1, 0);
      const auto masked = train_alone(options, {.x = x, .valid = valid, .sequence = shard}, d_y);
      const auto poison_padding = [](Tensor& rows) {
        for (const std::int64_t t : {1, 6, 7, 8, 9, 10, 11}) poison(rows.view().slice(t, t + 1));
      };
      poison_padding(x);
      expect_same(train_alone(options, {.x = x, .sequence = shard}, d_y), masked);
      poison_padding(d_y);
      expect_same(train_alone(options, {.x = x, .valid = valid, .sequence = shard}, d_y), masked);
    }
  }
}

TEST(LayerTraining, NothingButPaddingGivesZeros) {
  auto options = small_layer_options();
  options.losses = {.balance = BalanceLoss::batch, .z = true};
  options.shared_intermediate = 6;
  options.shared_activation = Activation::gelu;
  options.gradient_scale = GradientScale::global;
  Tensor x({12, 20}, Dtype::f32);
  poison(x);
  const auto results = train_alone(options, {.x = x, .valid = Tensor::zeros({12}, Dtype::i32)},
                                   x.clone(), {}, Biases::all);
  const Tensor zeros = Tensor::zeros({12, 20}, Dtype::f32);
  EXPECT_TRUE(same_bits(results.y, zeros));
  EXPECT_TRUE(same_bits(results.d_x, zeros));
  EXPECT_EQ(results.losses.z, 0.0F);
}

// Ids of a bounded plan that are refused count as −1: also for statistics and losses.
TEST(LayerTraining, RefusedPicksAreNotCounted) {
  auto options = small_layer_options();
  options.sizing = Sizing::bounded(64);
  options.losses = {.balance = BalanceLoss::batch};
  const Tensor x = Random(3).tensor({4, 20}, Dtype::f32);
  const auto counted = [&](std::initializer_list<std::int32_t> ids) {
    LayerAlone alone(options);
    SavedForBackward saved;
    const Tensor given = Tensor::from<std::int32_t>({4, 2}, ids);
    (void)alone.layer.forward(alone.weights, {.x = x, .expert_ids = given}, saved);
    alone.layer.commit_pick_counts(saved);
    return std::pair(alone.layer.pick_counts().picks, saved.losses().balance);
  };
  EXPECT_EQ(counted({0, 0, 1, 9, 2, 3, 0, 1}), counted({0, -1, 1, -1, 2, 3, 0, 1}));
}

class LayerTrainingOnRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(LayerTrainingOnRanks, HasTheBitsOfOneRankInBf16OnThreads) {
  on_ranks(GetParam(), [](Communicator& comm) {
    auto options = small_layer_options();
    options.dtype = Dtype::bf16;
    options.losses = {.balance = BalanceLoss::batch, .z = true};
    options.gradient_scale = GradientScale::global;
    const Tensor x = Random(3).tensor({500, 20}, Dtype::bf16);
    const Tensor d_y = Random(4).tensor({500, 20}, Dtype::bf16);
    LayerAlone alone(options);
    const auto one = train(alone.layer, alone.weights, {.x = x}, d_y);
    const auto piece = awkward_piece(comm, 500);
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    const auto weights = part_of(alone.weights, placement, comm.rank());
    for (const MoverKind mover : movers_of(comm)) {
      options.mover = mover;
      MoeLayer layer(comm, placement, options, Device::cpu({.num_threads = 3}));
      const auto many = train(layer, weights, {.x = piece.of(x)}, piece.of(d_y));
      EXPECT_TRUE(on_all(comm, many.losses.balance == one.losses.balance));
      EXPECT_TRUE(on_all(comm, many.losses.z == one.losses.z));
      EXPECT_TRUE(on_all(comm, same_bits(many.y, piece.of(one.y))));
      EXPECT_TRUE(on_all(comm, same_bits(many.d_x, piece.of(one.d_x))));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LayerTrainingOnRanks, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(LayerTraining, IsTheSameHoweverRowsAreCombined) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<Results> all;
    const auto seed = static_cast<std::uint64_t>(comm.rank());
    const Tensor x = Random(5 + seed).tensor({30, 20}, Dtype::f32);
    const Tensor d_y = Random(15 + seed).tensor({30, 20}, Dtype::f32);
    const Tensor ids =
        Random(25 + seed).expert_ids({.num_tokens = 30, .top_k = 2, .num_experts = 6, .none = 0.3});
    for (const auto mode : {CombineMode::per_assignment, CombineMode::pre_reduced}) {
      for (const auto stage : {WeightStage::output, WeightStage::activation}) {
        auto options = small_layer_options();
        options.mover = MoverKind::packed;
        options.combine = mode;
        options.weight_stage = stage;
        options.gradient_scale = GradientScale::rank;
        options.capacity.factor = 0.6;
        options.losses = {.balance = BalanceLoss::batch};
        const auto placement = ExpertPlacement::contiguous(6, comm.size());
        MoeLayer layer(comm, placement, options);
        Random random(4);
        const auto weights =
            part_of(random_layer(random, options, Biases::all), placement, comm.rank());
        all.push_back(train(layer, weights, {.x = x, .expert_ids = ids}, d_y));
      }
    }
    for (std::size_t i = 1; i < all.size(); ++i) {
      EXPECT_TRUE(near(all[i].y, all[0].y, 2e-6));
      EXPECT_TRUE(near(all[i].d_x, all[0].d_x, 2e-6));
      EXPECT_TRUE(near(all[i].d_gate, all[0].d_gate, 5e-6));
    }
  });
}

}  // namespace
}  // namespace switchyard::layer_training_test
