// Steps of several bounded layers that are run again exactly when one overflows.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "support/compare.h"
#include "support/cut.h"
#include "support/errors.h"
#include "support/layer_alone.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

using testing::copy_of;
using testing::error_of;
using testing::gradients_for;
using testing::LayerAlone;
using testing::on_all;
using testing::on_ranks;
using testing::part_of;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;

constexpr int kLayers = 2;

// Two layers one after the other, on some ranks of a world.
struct Model {
  Model(const LayerGroups& groups, const std::array<Sizing, kLayers>& sizings)
      : placement(ExpertPlacement::contiguous(6, groups.experts.size())) {
    for (std::size_t l = 0; l < kLayers; ++l) {
      auto options = small_layer_options();
      options.sizing = sizings.at(l);
      options.alignment = 4;
      options.losses = {.balance = BalanceLoss::batch, .z = true};
      Random random(l + 1);
      weights.push_back(
          part_of(random_layer(random, options, Biases::none), placement, groups.experts.rank()));
      gradients.push_back(gradients_for(weights.back()));
      layers.push_back(std::make_unique<MoeLayer>(groups, placement, options));
    }
  }

  // Writes y, d_x, losses and gradients, whatever they were before.
  void step(const Tensor& x) {
    std::array<SavedForBackward, kLayers> saved;
    std::array<Tensor, kLayers> outputs;
    for (std::size_t l = 0; l < kLayers; ++l) {
      outputs.at(l) =
          layers[l]->forward(weights[l], {.x = l == 0 ? x : outputs.at(l - 1)}, saved.at(l));
      losses.at(l) = saved.at(l).losses();
    }
    Tensor d = outputs.back().clone();
    for (std::size_t l = kLayers; l-- > 0;) {
      Tensor d_in(x.shape(), Dtype::f32);
      layers[l]->backward(weights[l], saved.at(l),
                          {.d_y = d, .d_losses = {.balance = 0.1F, .z = 0.1F}},
                          {.d_x = d_in, .gradients = gradients[l]});
      d = std::move(d_in);
    }
    d_x = std::move(d);
    y = std::move(outputs.back());
  }

  bool run(const Tensor& x) {
    std::vector<MoeLayer*> all;
    for (const auto& layer : layers) all.push_back(layer.get());
    return run_step(all, [&] { step(x); });
  }

  ExpertPlacement placement;
  std::vector<std::unique_ptr<MoeLayer>> layers;
  std::vector<MoeWeights> weights;
  std::vector<MoeGradients> gradients;
  std::array<RouterLosses, kLayers> losses;
  Tensor y, d_x;
};

bool same_results(const Model& a, const Model& b) {
  bool same = same_bits(a.y, b.y) && same_bits(a.d_x, b.d_x);
  for (std::size_t l = 0; l < kLayers; ++l) {
    same = same && a.losses.at(l).balance == b.losses.at(l).balance &&
           a.losses.at(l).z == b.losses.at(l).z &&
           same_bits(a.gradients[l].router.gate, b.gradients[l].router.gate) &&
           a.layers[l]->statistics().picks == b.layers[l]->statistics().picks &&
           a.layers[l]->statistics().num_tokens == b.layers[l]->statistics().num_tokens;
    for (std::size_t e = 0; same && e < a.gradients[l].experts.size(); ++e) {
      same =
          same_bits(copy_of(a.gradients[l].experts[e].up), copy_of(b.gradients[l].experts[e].up)) &&
          same_bits(a.gradients[l].experts[e].down, b.gradients[l].experts[e].down);
    }
  }
  return same;
}

Tensor tokens_of(int rank, std::int64_t count) {
  return Random(20 + static_cast<std::uint64_t>(rank)).tensor({count, 20}, Dtype::f32);
}

constexpr std::int64_t kPlenty = 4096;

class RunStep : public ::testing::TestWithParam<RankCase> {};

TEST_P(RunStep, IsTheExactStepWhenOneLayerOverflows) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const Tensor x = tokens_of(comm.rank(), comm.rank() == 1 ? 0 : 24);
    const std::array<Sizing, kLayers> exact{};
    Model expected({.experts = comm}, exact);
    for (int which = 0; which < kLayers; ++which) {
      std::array<Sizing, kLayers> sizings{Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)};
      sizings.at(static_cast<std::size_t>(which)) = Sizing::bounded(4);
      Model bounded({.experts = comm}, sizings);
      for (const bool replayed : {true, false}) {  // the second time there is room
        expected.step(x);
        EXPECT_EQ(bounded.run(x), replayed);
        EXPECT_TRUE(on_all(comm, same_results(bounded, expected)));
      }
      const Sizing& grown = bounded.layers[static_cast<std::size_t>(which)]->options().sizing;
      EXPECT_TRUE(grown.is_bounded());
      EXPECT_GT(grown.capacity(), 4);
      EXPECT_EQ(grown.capacity() % 4, 0);
      EXPECT_EQ(bounded.layers[static_cast<std::size_t>(1 - which)]->options().sizing.capacity(),
                kPlenty);
      for (const auto& layer : expected.layers) (void)layer->take_statistics();
    }
  });
}

TEST_P(RunStep, KeepsWhatWasCountedBefore) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Model model({.experts = comm}, {Sizing::bounded(kPlenty), Sizing::bounded(4)});
    Model expected({.experts = comm}, {});
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
    const LayerGroups groups{.experts = mesh.group({"ep"}), .batch = &world};
    const bool is_busy = mesh.coordinate("dp") == 1;
    const Tensor x = tokens_of(world.rank(), is_busy ? 40 : 2);
    Model expected(groups, {});
    Model bounded(groups, {Sizing::bounded(32), Sizing::bounded(kPlenty)});
    expected.step(x);
    EXPECT_TRUE(bounded.run(x));
    EXPECT_TRUE(same_results(bounded, expected));
    EXPECT_GT(bounded.layers[0]->options().sizing.capacity(), 32);
    EXPECT_FALSE(bounded.run(x));
  });
}

TEST(RunStep, LeavesDroppingToThoseWhoAskForIt) {
  const auto world = connect();
  Model model({.experts = *world},
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
  EXPECT_EQ(bounded.layer.statistics().picks, exact.layer.statistics().picks);
  EXPECT_FALSE(run_step(all, [&] { step(bounded, actual); }));
}

// What a forward saved stays good when the layer's capacity has changed since.
TEST(RunStep, LeavesEarlierPlansAsTheyWere) {
  run_ranks(2, [](Communicator& comm) {
    for (const auto mover : {MoverKind::direct, MoverKind::packed}) {
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

TEST(RunStep, OfALayerListedTwiceKeepsItsBound) {
  auto options = small_layer_options();
  options.sizing = Sizing::bounded(0);
  LayerAlone alone(options);
  const Tensor x = tokens_of(0, 30);
  const std::vector<MoeLayer*> twice{&alone.layer, &alone.layer};
  EXPECT_TRUE(run_step(twice, [&] { (void)alone.layer.forward(alone.weights, {.x = x}); }));
  EXPECT_TRUE(alone.layer.options().sizing.is_bounded());
  const std::vector<MoeLayer*> null{&alone.layer, nullptr};
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)run_step(null, [] {}); }),
            "run_step: layer 1 of 2 is null");
}

TEST(RunStep, OfLayersOfDifferentBatchesIsRefused) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    Communicator& experts = mesh.group({"ep"});
    const auto placement = ExpertPlacement::contiguous(6, 2);
    MoeLayer narrow(experts, placement, small_layer_options());
    MoeLayer wide({.experts = experts, .batch = &world}, placement, small_layer_options());
    const std::vector<MoeLayer*> both{&narrow, &wide};
    EXPECT_EQ(error_of<InvalidArgument>([&] { (void)run_step(both, [] {}); }),
              "run_step: layers 0 and 1 have batches of 2 and 4 ranks, but must have the same one");
  });
}

TEST(RunStep, AStepThatFailsOnOneRankReachesTheOthers) {
  run_ranks(2,
            [](Communicator& comm) {
              Model model({.experts = comm}, {Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)});
              const std::vector<MoeLayer*> all{model.layers[0].get(), model.layers[1].get()};
              const auto run = [&] {
                (void)run_step(all, [&] {
                  if (comm.rank() == 1) throw std::runtime_error("no data");
                  model.step(tokens_of(comm.rank(), 5));
                });
              };
              if (comm.rank() == 1) {
                EXPECT_EQ(error_of<std::runtime_error>(run), "no data");
              } else {
                const auto seen = error_of<CommunicationError>(run);
                EXPECT_NE(seen.find("rank 1 gave up: run_step: no data"), std::string::npos)
                    << seen;
              }
            },
            {.timeout = std::chrono::seconds(20)});
}

// One group of experts overflows, another has a NaN: the NaN is the error of all.
TEST(RunStep, ANanCountsForMoreThanAnOverflow) {
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    Model model({.experts = mesh.group({"ep"}), .batch = &world},
                {Sizing::bounded(8), Sizing::bounded(kPlenty)});
    Tensor x = tokens_of(world.rank(), mesh.coordinate("dp") == 0 ? 40 : 2);
    if (world.rank() == 3) x.span<float>()[20] = std::numeric_limits<float>::quiet_NaN();
    errors.at(static_cast<std::size_t>(world.rank())) =
        error_of<InvalidArgument>([&] { (void)model.run(x); });
    world.barrier();  // still works
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_NE(error.find("rank 1: the router's logits of token 1"), std::string::npos) << error;
  }
}

TEST(RunStep, OfNoLayersRunsOnce) {
  int runs = 0;
  EXPECT_FALSE(run_step({}, [&] { ++runs; }));
  EXPECT_EQ(runs, 1);
}

TEST(RunStep, LogitsThatAreNotFiniteAreTheSameErrorInAllGroups) {
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    Model model({.experts = mesh.group({"ep"}), .batch = &world},
                {Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)});
    Tensor x = tokens_of(world.rank(), 6);
    EXPECT_FALSE(model.run(x));
    const auto counted = model.layers[0]->statistics().picks;
    if (world.rank() == 2) x.span<float>()[7 * 3] = std::numeric_limits<float>::quiet_NaN();
    errors.at(static_cast<std::size_t>(world.rank())) =
        error_of<InvalidArgument>([&] { model.run(x); });
    EXPECT_EQ(model.layers[0]->statistics().picks, counted);
    world.barrier();  // still works
  });
  for (const auto& error : errors) EXPECT_EQ(error, errors[0]);
  EXPECT_NE(errors[0].find("run_step: rank 2: in its group of experts, rank 0: the router's logits "
                           "of token 1 are not finite"),
            std::string::npos)
      << errors[0];
}

TEST(RunStep, AnErrorOfTheStepLeavesStatisticsAsTheyWere) {
  for (const int failing_run : {1, 2}) {  // the first, and the exact one
    const auto world = connect();
    Model model({.experts = *world}, {Sizing::bounded(4), Sizing::bounded(4)});
    const Tensor x = tokens_of(0, 20);
    (void)model.run(x);
    const auto counted = model.layers[0]->statistics().picks;
    const auto capacity = model.layers[0]->options().sizing.capacity();
    const Tensor more = tokens_of(0, failing_run == 1 ? 20 : 200);
    int runs = 0;
    const std::vector<MoeLayer*> all{model.layers[0].get(), model.layers[1].get()};
    EXPECT_EQ(error_of<std::runtime_error>([&] {
                (void)run_step(all, [&] {
                  model.step(more);
                  if (++runs == failing_run) throw std::runtime_error("no more");
                });
              }),
              "no more");
    EXPECT_EQ(model.layers[0]->statistics().picks, counted);
    EXPECT_EQ(model.layers[0]->options().sizing.capacity(), capacity);
  }
}

}  // namespace
}  // namespace switchyard
