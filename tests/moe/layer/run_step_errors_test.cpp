// SPDX-License-Identifier: Apache-2.0
// Errors in run_step, and the ranks they reach.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/layer/two_layers.h"
#include "switchyard/error.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard::run_step_errors_test {
namespace {

using testing::error_of;
using testing::kPlenty;
using testing::LayerAlone;
using testing::small_layer_options;
using testing::tokens_of;
using testing::TwoLayers;

TEST(RunStepErrors, OfNullLayersAreNamedAndALayerMayBeListedTwice) {
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

TEST(RunStepErrors, OfLayersOfDifferentBatchesAreNamed) {
  run_ranks(4, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    Communicator& experts = mesh.comm({"ep"});
    const auto placement = ExpertPlacement::contiguous(6, 2);
    MoeLayer narrow(experts, placement, small_layer_options());
    MoeLayer wide({.experts = experts, .batch = &world}, placement, small_layer_options());
    const std::vector<MoeLayer*> both{&narrow, &wide};
    EXPECT_EQ(error_of<InvalidArgument>([&] { (void)run_step(both, [] {}); }),
              "run_step: layers 0 and 1 have batches of 2 and 4 ranks, but all layers must share "
              "one batch");
  });
}

TEST(RunStepErrors, AStepThatFailsOnOneRankReachesTheOthers) {
  run_ranks(
      2,
      [](Communicator& comm) {
        TwoLayers model({.experts = comm}, {Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)});
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
          EXPECT_NE(seen.find("rank 1 gave up: run_step: no data"), std::string::npos) << seen;
        }
      },
      {.timeout = std::chrono::seconds(20)});
}

// One group of experts overflows, another has a NaN: the NaN is the error of all.
TEST(RunStepErrors, ANanIsReportedBeforeAnOverflow) {
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    TwoLayers model({.experts = mesh.comm({"ep"}), .batch = &world},
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

TEST(RunStepErrors, LogitsThatAreNotFiniteAreTheSameErrorInAllGroups) {
  std::array<std::string, 4> errors;
  run_ranks(4, [&](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
    TwoLayers model({.experts = mesh.comm({"ep"}), .batch = &world},
                    {Sizing::bounded(kPlenty), Sizing::bounded(kPlenty)});
    Tensor x = tokens_of(world.rank(), 6);
    EXPECT_FALSE(model.run(x));
    const auto counted = model.layers[0]->pick_counts().picks;
    if (world.rank() == 2) x.span<float>()[7 * 3] = std::numeric_limits<float>::quiet_NaN();
    errors.at(static_cast<std::size_t>(world.rank())) =
        error_of<InvalidArgument>([&] { model.run(x); });
    EXPECT_EQ(model.layers[0]->pick_counts().picks, counted);
    world.barrier();  // still works
  });
  for (const auto& error : errors) EXPECT_EQ(error, errors[0]);
  EXPECT_NE(errors[0].find("run_step: rank 2: in its group of experts, rank 0: the router's logits "
                           "of token 1 are not finite"),
            std::string::npos)
      << errors[0];
}

TEST(RunStepErrors, AnErrorOfTheStepLeavesStatisticsAsTheyWere) {
  for (const int failing_run : {1, 2}) {  // the first, and the exact one
    const auto world = connect();
    TwoLayers model({.experts = *world}, {Sizing::bounded(4), Sizing::bounded(4)});
    const Tensor x = tokens_of(0, 20);
    (void)model.run(x);
    const auto counted = model.layers[0]->pick_counts().picks;
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
    EXPECT_EQ(model.layers[0]->pick_counts().picks, counted);
    EXPECT_EQ(model.layers[0]->options().sizing.capacity(), capacity);
  }
}

}  // namespace
}  // namespace switchyard::run_step_errors_test
