// SPDX-License-Identifier: Apache-2.0
// A layer counts every training step once, and nothing else.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/mesh.h"

namespace switchyard::statistics_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::expect_same_bits;
using testing::gradients_for;
using testing::LayerAlone;
using testing::on_ranks;
using testing::part_of;
using testing::poison;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;

using Counts = std::vector<std::int64_t>;

struct Statistics : ::testing::Test {
  LayerAlone alone{small_layer_options()};
  Tensor x = Random(3).tensor({31, 20}, Dtype::f32);
  Tensor d_y = Random(4).tensor({31, 20}, Dtype::f32);

  Counts picks_of(const SavedForBackward& saved) {
    Counts picks(6, 0);
    for (const auto id : saved.routing().expert_ids.span<std::int32_t>()) {
      if (id >= 0) ++picks[static_cast<std::size_t>(id)];
    }
    return picks;
  }
  PickCounts counted() const { return alone.layer.pick_counts(); }
};

TEST_F(Statistics, CountATrainingStepInItsBackward) {
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  EXPECT_EQ(counted().picks, Counts(6, 0));
  EXPECT_EQ(counted().num_tokens, 0);
  const auto picks = picks_of(saved);
  (void)backward(alone, saved, d_y);
  EXPECT_EQ(counted().picks, picks);
  EXPECT_EQ(counted().num_tokens, 31);
}

TEST_F(Statistics, StayAsTheyWereWhenTheyWereAskedFor) {
  const PickCounts& before = alone.layer.pick_counts();
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  (void)backward(alone, saved, d_y);
  EXPECT_EQ(counted().num_tokens, 31);
  EXPECT_EQ(before.num_tokens, 0);
  EXPECT_EQ(before.picks, Counts(6, 0));
}

TEST_F(Statistics, DoNotCountEvaluation) {
  (void)alone.layer.forward(alone.weights, {.x = x});
  SavedForBackward thrown_away;
  (void)alone.layer.forward(alone.weights, {.x = x}, thrown_away);
  EXPECT_EQ(counted().picks, Counts(6, 0));
}

TEST_F(Statistics, CountAForwardThatIsComputedAgainOnce) {
  SavedForBackward first;
  SavedForBackward again;
  (void)alone.layer.forward(alone.weights, {.x = x}, first);
  (void)alone.layer.forward(alone.weights, {.x = x}, again);
  const auto picks = picks_of(again);
  (void)backward(alone, again, d_y);
  EXPECT_EQ(counted().picks, picks);

  auto options = small_layer_options();
  options.keep = Keep::nothing;
  LayerAlone recomputing(options);
  SavedForBackward saved;
  (void)recomputing.layer.forward(recomputing.weights, {.x = x}, saved);
  (void)backward(recomputing, saved, d_y);
  EXPECT_EQ(recomputing.layer.pick_counts().picks, picks);
}

TEST_F(Statistics, CountOnceWhatIsCommittedByHand) {
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  const auto picks = picks_of(saved);
  alone.layer.commit_pick_counts(saved);
  alone.layer.commit_pick_counts(saved);
  (void)backward(alone, saved, d_y);
  EXPECT_EQ(counted().picks, picks);
}

TEST_F(Statistics, AddUpUntilTheyAreTaken) {
  Counts expected(6, 0);
  for (const std::int64_t tokens : {31, 7}) {
    SavedForBackward saved;
    const Tensor part = copy_of(x.view().slice(0, tokens));
    (void)alone.layer.forward(alone.weights, {.x = part}, saved);
    const auto picks = picks_of(saved);
    for (std::size_t e = 0; e < 6; ++e) expected[e] += picks[e];
    (void)backward(alone, saved, copy_of(d_y.view().slice(0, tokens)));
  }
  const auto taken = alone.layer.take_pick_counts();
  EXPECT_EQ(taken.picks, expected);
  EXPECT_EQ(taken.num_tokens, 38);
  EXPECT_EQ(counted().picks, Counts(6, 0));
  EXPECT_EQ(counted().num_tokens, 0);
}

TEST_F(Statistics, CountPicksThatCapacityDrops) {
  auto options = small_layer_options();
  options.capacity.factor = 0.5;
  LayerAlone limited(options);
  SavedForBackward saved;
  (void)limited.layer.forward(limited.weights, {.x = x}, saved);
  const auto picks = picks_of(saved);
  EXPECT_GT(limited.layer.stats().over_capacity, 0);
  (void)backward(limited, saved, d_y);
  EXPECT_EQ(limited.layer.pick_counts().picks, picks);
}

class StatisticsOnRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(StatisticsOnRanks, AreTakenOverTheWholeBatch) {
  on_ranks(GetParam(), [](Communicator& world) {
    LayerAlone alone(small_layer_options());
    const Tensor x = Random(3).tensor({500, 20}, Dtype::f32);
    SavedForBackward saved;
    (void)alone.layer.forward(alone.weights, {.x = x}, saved);
    alone.layer.commit_pick_counts(saved);

    Mesh mesh(world, {{"dp", world.size() % 2 == 0 ? 2 : 1},
                      {"ep", world.size() % 2 == 0 ? world.size() / 2 : world.size()}});
    const auto placement = ExpertPlacement::contiguous(6, mesh.size("ep"));
    Communicator& experts = mesh.comm({"ep"});
    MoeLayer layer({.experts = experts, .batch = &world}, placement, small_layer_options());
    const auto piece = awkward_piece(world, 500);
    (void)layer.forward(part_of(alone.weights, placement, experts.rank()), {.x = piece.of(x)},
                        saved);
    layer.commit_pick_counts(saved);
    EXPECT_EQ(layer.take_pick_counts().picks, alone.layer.pick_counts().picks);
    EXPECT_EQ(layer.pick_counts().num_tokens, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StatisticsOnRanks, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

// Every third token is padding.
struct Padded {
  Tensor valid = Tensor::zeros({31}, Dtype::i32);
  std::vector<std::int64_t> tokens;

  Padded() {
    for (std::int64_t t = 0; t < 31; ++t) {
      if (t % 3 == 1) continue;
      valid.span<std::int32_t>()[static_cast<std::size_t>(t)] = 1;
      tokens.push_back(t);
    }
  }
  Tensor without_padding(const ConstTensorView& rows) const {
    Tensor result({static_cast<std::int64_t>(tokens.size()), rows.shape()[1]}, rows.dtype());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::copy_n(rows.row(tokens[i]), rows.row_bytes(),
                  result.view().row(static_cast<std::int64_t>(i)));
    }
    return result;
  }
  void poison_padding(Tensor& rows) const {
    for (std::int64_t t = 1; t < 31; t += 3) poison(rows.view().slice(t, t + 1));
  }
  bool padding_is_zero(const Tensor& rows) const {
    for (std::int64_t t = 1; t < 31; t += 3) {
      for (const float v : rows.view().slice(t, t + 1).span<float>()) {
        if (v != 0.0F) return false;
      }
    }
    return true;
  }
};

// Padding changes no bit of a layer's results.
TEST_F(Statistics, AreTheSameWithAndWithoutPadding) {
  auto options = small_layer_options();
  options.losses = {.balance = BalanceLoss::batch, .z = true};
  options.capacity.factor = 0.7;
  options.shared_intermediate = 6;
  options.shared_activation = Activation::gelu;
  const Padded padded;
  LayerAlone with_padding(options, Biases::all);
  LayerAlone without(options, Biases::all);
  padded.poison_padding(x);
  padded.poison_padding(d_y);
  const Tensor dense_x = padded.without_padding(x);
  const Tensor dense_d_y = padded.without_padding(d_y);

  SavedForBackward saved;
  SavedForBackward dense_saved;
  const Tensor y =
      with_padding.layer.forward(with_padding.weights, {.x = x, .valid = padded.valid}, saved);
  const Tensor dense_y = without.layer.forward(without.weights, {.x = dense_x}, dense_saved);
  EXPECT_TRUE(same_bits(padded.without_padding(y), dense_y));
  EXPECT_TRUE(padded.padding_is_zero(y));
  EXPECT_EQ(saved.losses().balance, dense_saved.losses().balance);
  EXPECT_EQ(saved.losses().z, dense_saved.losses().z);
  EXPECT_EQ(with_padding.layer.stats().over_capacity, without.layer.stats().over_capacity);

  const RouterLosses d_losses{.balance = 0.1F, .z = 0.2F};
  Tensor d_x(x.shape(), Dtype::f32);
  Tensor dense_d_x(dense_x.shape(), Dtype::f32);
  const auto gradients = gradients_for(with_padding.weights);
  const auto dense_gradients = gradients_for(without.weights);
  with_padding.layer.backward(with_padding.weights, saved, {.d_y = d_y, .d_losses = d_losses},
                              {.d_x = d_x, .gradients = gradients});
  without.layer.backward(without.weights, dense_saved, {.d_y = dense_d_y, .d_losses = d_losses},
                         {.d_x = dense_d_x, .gradients = dense_gradients});
  EXPECT_TRUE(same_bits(padded.without_padding(d_x), dense_d_x));
  EXPECT_TRUE(padded.padding_is_zero(d_x));
  EXPECT_TRUE(testing::near(gradients.router.gate, dense_gradients.router.gate, 1e-6));
  for (std::size_t e = 0; e < 6; ++e) {
    expect_same_bits(gradients.experts[e], dense_gradients.experts[e]);
  }
  EXPECT_TRUE(
      testing::near(copy_of(gradients.shared.up), copy_of(dense_gradients.shared.up), 1e-6));
  EXPECT_EQ(with_padding.layer.pick_counts().picks, without.layer.pick_counts().picks);
  EXPECT_EQ(with_padding.layer.pick_counts().num_tokens, 21);
}

}  // namespace
}  // namespace switchyard::statistics_test
