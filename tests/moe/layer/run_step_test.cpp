// SPDX-License-Identifier: Apache-2.0
// Steps of several bounded layers that are run again exactly when one overflows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/layer/two_layers.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard::run_step_test {
namespace {

using testing::copy_of;
using testing::gradients_for;
using testing::kLayers;
using testing::kPlenty;
using testing::LayerAlone;
using testing::movers_of;
using testing::on_all;
using testing::on_ranks;
using testing::part_of;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;
using testing::tokens_of;
using testing::TwoLayers;

bool same_results(const TwoLayers& a, const TwoLayers& b) {
  bool same = same_bits(a.y, b.y) && same_bits(a.d_x, b.d_x);
  for (std::size_t l = 0; l < kLayers; ++l) {
    same = same && a.losses.at(l).balance == b.losses.at(l).balance &&
           a.losses.at(l).z == b.losses.at(l).z &&
           same_bits(a.gradients[l].router.gate, b.gradients[l].router.gate) &&
           a.layers[l]->pick_counts().picks == b.layers[l]->pick_counts().picks &&
           a.layers[l]->pick_counts().num_tokens == b.layers[l]->pick_counts().num_tokens;
    for (std::size_t e = 0; same && e < a.gradients[l].experts.size(); ++e) {
      same =
          same_bits(copy_of(a.gradients[l].experts[e].up), copy_of(b.gradients[l].experts[e].up)) &&
          same_bits(a.gradients[l].experts[e].down, b.gradients[l].experts[e].down);
    }
  }
  return same;
}

class RunStep : public ::testing::TestWithParam<RankCase> {};

// With room for so little in one of the layers.
void expect_exact_step(Communicator& comm, const Sizing& little, std::size_t which,
                       MoverKind mover) {
  const Tensor x = tokens_of(comm.rank(), comm.rank() == 1 ? 0 : 24);
  TwoLayers expected({.experts = comm}, {}, mover);
  std::array<Sizing, kLayers> sizings{Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)};
  sizings.at(which) = little;
  TwoLayers bounded({.experts = comm}, sizings, mover);
  for (const bool replayed : {true, false}) {  // the second time there is room
    expected.step(x);
    EXPECT_EQ(bounded.run(x), replayed);
    EXPECT_TRUE(on_all(comm, same_results(bounded, expected)));
  }
  const Sizing& grown = bounded.layers[which]->options().sizing;
  EXPECT_TRUE(grown.is_bounded());
  EXPECT_GT(grown.token_capacity(), little.token_capacity());
  EXPECT_EQ(grown.capacity() % 4, 0);
  if (little.capacity() == kPlenty) {
    EXPECT_EQ(grown.capacity(), kPlenty);
  } else {
    EXPECT_GT(grown.capacity(), little.capacity());
  }
  EXPECT_EQ(bounded.layers[1 - which]->options().sizing.capacity(), kPlenty);
}

TEST_P(RunStep, IsTheExactStepWhenOneLayerOverflows) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      for (const std::size_t which : {0, 1}) {
        expect_exact_step(comm, Sizing::bounded(4), which, mover);
      }
    }
  });
}

// All rows have room; the tokens that they are copies of do not.
TEST_P(RunStep, IsTheExactStepWhenTokensOverflow) {
  on_ranks(GetParam(), [](Communicator& comm) {
    if (std::ranges::count(movers_of(comm), MoverKind::peer) == 0) return;
    for (const std::size_t which : {0, 1}) {
      expect_exact_step(comm, Sizing::bounded(kPlenty, Overflow::fail, 2), which, MoverKind::peer);
    }
  });
}

TEST_P(RunStep, KeepsWhatWasCountedBefore) {
  on_ranks(GetParam(), [](Communicator& comm) {
    TwoLayers model({.experts = comm}, {Sizing::bounded(kPlenty), Sizing::bounded(4)});
    TwoLayers expected({.experts = comm}, {});
    EXPECT_TRUE(model.run(tokens_of(comm.rank(), 3)));
    EXPECT_TRUE(model.run(tokens_of(comm.rank(), 60)));
    expected.step(tokens_of(comm.rank(), 3));
    expected.step(tokens_of(comm.rank(), 60));
    EXPECT_TRUE(on_all(comm, same_results(model, expected)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RunStep, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(RunStepOnMeshes, ReplaysEverywhereWhenOneGroupOfExpertsOverflows) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    const LayerComms groups{.experts = mesh.comm({"ep"}), .batch = &world};
    const bool is_busy = mesh.coordinate("dp") == 1;
    const Tensor x = tokens_of(world.rank(), is_busy ? 40 : 2);
    TwoLayers expected(groups, {});
    TwoLayers bounded(groups, {Sizing::bounded(32), Sizing::bounded(kPlenty)});
    expected.step(x);
    EXPECT_TRUE(bounded.run(x));
    EXPECT_TRUE(same_results(bounded, expected));
    EXPECT_GT(bounded.layers[0]->options().sizing.capacity(), 32);
    EXPECT_FALSE(bounded.run(x));
  });
}

TEST(RunStep, LeavesDroppingToThoseWhoAskForIt) {
  const auto world = connect();
  TwoLayers model({.experts = *world},
                  {Sizing::bounded(4, Overflow::drop), Sizing::bounded(4, Overflow::drop)});
  EXPECT_FALSE(model.run(tokens_of(0, 30)));
  EXPECT_GT(model.layers[0]->stats().dropped_by_rank[0], 0);
}

TEST(RunStep, MayRunALayerSeveralTimes) {
  auto options = small_layer_options();
  options.losses = {.balance = BalanceLoss::batch};
  LayerAlone exact(options);
  options.sizing = Sizing::bounded(16);
  LayerAlone bounded(options);
  const auto step = [](LayerAlone& alone, const MoeGradients& gradients) {
    for (int batch = 0; batch < 3; ++batch) {
      const Tensor x = tokens_of(batch, batch == 1 ? 40 : 5);
      SavedForBackward saved;
      const Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
      Tensor d_x(x.shape(), Dtype::f32);
      alone.layer.backward(
          alone.weights, saved, {.d_y = y, .d_losses = {.balance = 1.0F}},
          {.d_x = d_x,
           .gradients = gradients,
           .mode = batch == 0 ? GradientMode::overwrite : GradientMode::accumulate});
    }
  };
  const auto expected = gradients_for(exact.weights);
  const auto actual = gradients_for(bounded.weights);
  step(exact, expected);
  const std::vector<MoeLayer*> all{&bounded.layer};
  EXPECT_TRUE(run_step(all, [&] { step(bounded, actual); }));
  EXPECT_TRUE(same_bits(actual.router.gate, expected.router.gate));
  for (std::size_t e = 0; e < 6; ++e) {
    testing::expect_same_bits(actual.experts[e], expected.experts[e]);
  }
  EXPECT_EQ(bounded.layer.pick_counts().picks, exact.layer.pick_counts().picks);
  EXPECT_FALSE(run_step(all, [&] { step(bounded, actual); }));
}

// SavedForBackward stays valid when the layer's capacity changes after the forward.
TEST(RunStep, LeavesEarlierPlansAsTheyWere) {
  run_ranks(2, [](Communicator& comm) {
    for (const auto mover : {MoverKind::direct, MoverKind::packed, MoverKind::peer}) {
      auto options = small_layer_options();
      options.mover = mover;
      const auto placement = ExpertPlacement::contiguous(6, 2);
      Random random(4);
      const auto weights =
          part_of(random_layer(random, options, Biases::none), placement, comm.rank());
      MoeLayer exact(comm, placement, options);
      options.sizing = Sizing::bounded(64);
      MoeLayer bounded(comm, placement, options);
      const Tensor x = tokens_of(comm.rank(), 10);
      const Tensor many = tokens_of(2, 200);
      SavedForBackward expected;
      SavedForBackward earlier;
      (void)exact.forward(weights, {.x = x}, expected);
      (void)bounded.forward(weights, {.x = x}, earlier);
      const std::vector<MoeLayer*> all{&bounded};
      EXPECT_TRUE(run_step(all, [&] { (void)bounded.forward(weights, {.x = many}); }));
      Tensor actual_d_x(x.shape(), Dtype::f32);
      Tensor expected_d_x(x.shape(), Dtype::f32);
      const auto gradients = gradients_for(weights);
      bounded.backward(weights, earlier, x, {.d_x = actual_d_x, .gradients = gradients});
      exact.backward(weights, expected, x, {.d_x = expected_d_x, .gradients = gradients});
      EXPECT_TRUE(same_bits(actual_d_x, expected_d_x));
    }
  });
}

TEST(RunStep, OfNoLayersRunsOnce) {
  int runs = 0;
  EXPECT_FALSE(run_step({}, [&] { ++runs; }));
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace switchyard::run_step_test
