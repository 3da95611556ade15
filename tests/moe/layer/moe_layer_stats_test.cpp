// SPDX-License-Identifier: Apache-2.0
// A layer's statistics of its last step.
#include <gtest/gtest.h>

#include <numeric>

#include "support/layer/layer_alone.h"
#include "switchyard/run_ranks.h"

namespace switchyard::moe_layer_stats_test {
namespace {

using testing::gradients_for;
using testing::LayerAlone;
using testing::part_of;
using testing::Random;
using testing::small_layer_options;

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::vector<std::string> names_of(const std::vector<LayerStats::Stage>& stages) {
  std::vector<std::string> names;
  for (const auto& stage : stages) {
    EXPECT_GE(stage.seconds, 0.0) << stage.name;
    names.emplace_back(stage.name);
  }
  return names;
}

TEST(MoeLayerStats, CountEveryRowOnce) {
  run_ranks(3, [](Communicator& comm) {
    auto options = small_layer_options();
    options.shared_intermediate = 4;
    options.keep = Keep::activations;
    const auto placement = ExpertPlacement::from_owners({0, 0, 0, 2, 2, 0}, 3);
    MoeLayer layer(comm, placement, options);
    Random random(4);
    const auto weights =
        part_of(random_layer(random, options, Biases::none), placement, comm.rank());
    const std::int64_t num_tokens = 4 * comm.rank();
    const Tensor x = Random(1).tensor({num_tokens, 20}, Dtype::f32);
    SavedForBackward saved;
    (void)layer.forward(weights, {.x = x}, saved);
    const LayerStats& stats = layer.stats();
    EXPECT_EQ(sum(stats.rows_by_expert), (4 + 8) * 2);
    EXPECT_EQ(sum(stats.rows_by_rank), (4 + 8) * 2);
    EXPECT_EQ(stats.rows_by_rank[1], 0);
    EXPECT_EQ(stats.rows_by_rank[2], stats.rows_by_expert[3] + stats.rows_by_expert[4]);
    for (std::size_t e = 0; e < 6; ++e) {
      EXPECT_EQ(stats.bytes_by_expert[e], stats.rows_by_expert[e] * 20 * 4);
    }
    EXPECT_EQ(sum(stats.bytes_by_rank), (4 + 8) * 2 * 20 * 4);
    EXPECT_EQ(stats.dropped_by_rank, (std::vector<std::int64_t>{0, 0, 0}));
    EXPECT_FALSE(stats.overflow);
    EXPECT_EQ(names_of(stats.forward),
              (std::vector<std::string>{"route", "plan", "dispatch", "experts", "activation",
                                        "combine", "shared"}));
    EXPECT_TRUE(stats.backward.empty());
    const auto forward_bytes = stats.bytes_on_wire;
    EXPECT_EQ(forward_bytes > 0, comm.rank() > 0);  // rank 0 has no tokens to send

    Tensor d_x(x.shape(), Dtype::f32);
    const auto gradients = gradients_for(weights);
    layer.backward(weights, saved, x, {.d_x = d_x, .gradients = gradients});
    EXPECT_EQ(
        names_of(layer.stats().backward),
        (std::vector<std::string>{"combine_backward", "dispatch_again", "experts", "activation",
                                  "dispatch_backward", "route_backward", "shared"}));
    EXPECT_GE(layer.stats().bytes_on_wire, 2 * forward_bytes);
    ASSERT_EQ(layer.stats().waited_for.size(), 3U);
    for (const double seconds : layer.stats().waited_for) EXPECT_GE(seconds, 0.0);
    EXPECT_EQ(layer.stats().waited_for[static_cast<std::size_t>(comm.rank())], 0.0);
  });
}

TEST(MoeLayerStats, TellOfDrops) {
  auto options = small_layer_options();
  options.sizing = Sizing::bounded(10, Overflow::drop);
  LayerAlone alone(options);
  const MoeLayer& layer = alone.layer;
  (void)alone.layer.forward(alone.weights, {.x = Random(1).tensor({8, 20}, Dtype::f32)});
  EXPECT_TRUE(layer.stats().overflow);
  EXPECT_TRUE(layer.plan_status().overflow);
  EXPECT_EQ(layer.stats().dropped_by_rank, std::vector<std::int64_t>{6});
  EXPECT_EQ(layer.stats().rows_by_rank, std::vector<std::int64_t>{10});
  EXPECT_EQ(layer.stats().bytes_by_rank, std::vector<std::int64_t>{10 * 20 * 4});
  EXPECT_EQ(layer.stats().bytes_on_wire, 0);
}

TEST(MoeLayerStats, StayAsTheyWereWhenTheyWereAskedFor) {
  auto options = small_layer_options();
  options.sizing = Sizing::bounded(10, Overflow::drop);
  LayerAlone alone(options);
  const LayerStats& stats = alone.layer.stats();
  const PlanStatus& status = alone.layer.plan_status();
  (void)alone.layer.forward(alone.weights, {.x = Random(1).tensor({8, 20}, Dtype::f32)});
  EXPECT_TRUE(alone.layer.stats().overflow);
  EXPECT_FALSE(stats.overflow);
  EXPECT_FALSE(status.overflow);
}

}  // namespace
}  // namespace switchyard::moe_layer_stats_test
