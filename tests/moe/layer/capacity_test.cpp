// SPDX-License-Identifier: Apache-2.0
// Capacity: that a layer without the picks it drops is right.
#include "switchyard/capacity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/layer/layer_alone.h"
#include "support/reference/cut.h"
#include "switchyard/run_ranks.h"

namespace switchyard::capacity_test {
namespace {

using testing::doubles_of;
using testing::gradients_for;
using testing::LayerAlone;
using testing::near;
using testing::part_of;
using testing::Random;
using testing::same_bits;
using testing::small_layer_options;
using testing::tensor_of;

class LayerCapacity : public ::testing::TestWithParam<CapacityRule> {};

// The reference has the picks that were dropped, with weight 0.
TEST_P(LayerCapacity, EqualsSendingTheDroppedPicksWithWeightZero) {
  auto options = small_layer_options();
  options.capacity = {.factor = 0.4, .rule = GetParam()};
  options.shared_intermediate = 5;
  LayerAlone alone(options);
  const Tensor x = Random(3).tensor({31, 20}, Dtype::f32);
  const Tensor d_y = Random(4).tensor({31, 20}, Dtype::f32);
  SavedForBackward saved;
  const Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);

  const auto dropped = alone.layer.stats().over_capacity;
  EXPECT_GT(dropped, 5);
  EXPECT_LT(dropped, 45);
  const Tensor slots_tensor = testing::copy_of(saved.plan().slots());
  const auto slots = slots_tensor.span<std::int32_t>();
  EXPECT_EQ(std::ranges::count(slots, -1), dropped);
  std::int64_t rows = 0;
  for (const auto n : alone.layer.stats().rows_by_expert) rows += n;
  EXPECT_EQ(rows, 62 - dropped);  // not sent, and so not computed
  const auto most = static_cast<std::int64_t>(std::ceil(62.0 / 6 * 0.4));
  const auto slots_of_each = GetParam() == CapacityRule::first_come ? 2 : 1;
  for (const auto n : alone.layer.stats().rows_by_expert) EXPECT_LE(n, most * slots_of_each);

  const auto weights = doubles_of(alone.weights);
  const auto tokens = doubles_of(x);
  const auto ids = saved.routing().expert_ids.span<std::int32_t>();
  testing::ReferenceRouting routing{.expert_ids = {ids.begin(), ids.end()}};
  routing.weights = reference_replay(options.router, weights.router, tokens, routing.expert_ids);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0) routing.weights.values[i] = 0.0;
  }
  EXPECT_TRUE(near(y, tensor_of(reference_layer(options, weights, tokens, routing)), 1e-5));

  // By differences, with the dropped picks' weights held at zero.
  auto varied = tokens;
  const auto expected_y_dot = [&] {
    auto now = routing;
    now.weights = reference_replay(options.router, weights.router, varied, now.expert_ids);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] < 0) now.weights.values[i] = 0.0;
    }
    return dot(reference_layer(options, weights, varied, now), doubles_of(d_y));
  };
  Tensor d_x(x.shape(), Dtype::f32);
  alone.layer.backward(alone.weights, saved, d_y,
                       {.d_x = d_x, .gradients = gradients_for(alone.weights)});
  EXPECT_TRUE(near(d_x, tensor_of(testing::numeric_gradient(varied, expected_y_dot)), 1e-5));
}

// A rank's picks are limited by that rank's tokens, whoever owns the experts.
TEST_P(LayerCapacity, CountsTheTokensOfTheRank) {
  auto options = small_layer_options();
  options.capacity = {.factor = 0.6, .rule = GetParam()};
  run_ranks(3, [&](Communicator& comm) {
    const Tensor x = Random(static_cast<std::uint64_t>(comm.rank()) + 5)
                         .tensor({12 * comm.rank(), 20}, Dtype::f32);
    LayerAlone alone(options);
    const Tensor expected = alone.layer.forward(alone.weights, {.x = x});
    const auto placement = ExpertPlacement::contiguous(6, 3);
    MoeLayer layer(comm, placement, options);
    const Tensor y = layer.forward(part_of(alone.weights, placement, comm.rank()), {.x = x});
    EXPECT_TRUE(near(y, expected, 1e-6));
    EXPECT_EQ(layer.stats().over_capacity, alone.layer.stats().over_capacity);
    EXPECT_EQ(layer.stats().over_capacity > 0, comm.rank() > 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Rules, LayerCapacity,
                         ::testing::Values(CapacityRule::first_come, CapacityRule::highest_weight),
                         [](const auto& param) {
                           return param.param == CapacityRule::first_come ? "first_come"
                                                                          : "highest_weight";
                         });

TEST(LayerCapacity, OfAllPicksChangesNothing) {
  auto options = small_layer_options();
  LayerAlone unlimited(options);
  options.capacity.factor = 6.0;  // an expert may have them all
  LayerAlone limited(options);
  const Tensor x = Random(3).tensor({31, 20}, Dtype::f32);
  EXPECT_TRUE(same_bits(limited.layer.forward(limited.weights, {.x = x}),
                        unlimited.layer.forward(unlimited.weights, {.x = x})));
  EXPECT_EQ(limited.layer.stats().over_capacity, 0);
}

TEST(LayerCapacity, AFactorBeyondAllNumbersIsNoLimit) {
  auto options = small_layer_options();
  options.capacity.factor = 1e300;
  LayerAlone alone(options);
  (void)alone.layer.forward(alone.weights, {.x = Random(3).tensor({64, 20}, Dtype::f32)});
  EXPECT_EQ(alone.layer.stats().over_capacity, 0);
}

TEST(LayerCapacity, IsAtLeastOne) {
  auto options = small_layer_options();
  options.capacity.factor = 1e-9;
  LayerAlone alone(options);
  const Tensor x = Random(3).tensor({31, 20}, Dtype::f32);
  (void)alone.layer.forward(alone.weights, {.x = x});
  EXPECT_EQ(alone.layer.stats().over_capacity, 62 - 2 * 6);
}

}  // namespace
}  // namespace switchyard::capacity_test
