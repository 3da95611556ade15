// SPDX-License-Identifier: Apache-2.0
// GradientScale: the factors, that they reach outputs and gradients, and only in training.
#include <gtest/gtest.h>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/reference/cut.h"

namespace switchyard::output_scales_test {
namespace {

using testing::awkward_piece;
using testing::expect_same_bits;
using testing::gradients_for;
using testing::LayerAlone;
using testing::movers_of;
using testing::near;
using testing::on_all;
using testing::on_ranks;
using testing::part_of;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;

std::vector<float> output_scales(GradientScale rule, const std::vector<std::int64_t>& picks,
                                 const ExpertPlacement& placement) {
  const Shape experts{static_cast<std::int64_t>(picks.size())};
  Tensor scales(experts, Dtype::f32);
  backend_of(Device()).output_scales(
      {.rule = rule,
       .picks = Tensor::from<std::int64_t>(experts, picks),
       .owners = Tensor::from<std::int32_t>(experts, placement.owners()),
       .scales = scales});
  return {scales.span<float>().begin(), scales.span<float>().end()};
}

TEST(OutputScales, AreTheMeanOverTheCount) {
  const auto placement = ExpertPlacement::from_lists(4, {{0, 3}, {1, 2}});
  const std::vector<std::int64_t> picks{6, 1, 0, 2};
  EXPECT_EQ(output_scales(GradientScale::rank, picks, placement),
            (std::vector<float>{4.0F / 6.0F, 0.5F, 1.0F, 2.0F}));
  EXPECT_EQ(output_scales(GradientScale::global, picks, placement),
            (std::vector<float>{2.25F / 6.0F, 2.25F, 1.0F, 2.25F / 2.0F}));
}

MoeLayerOptions scaled_options(GradientScale rule) {
  auto options = small_layer_options();
  options.gradient_scale = rule;
  return options;
}

// With expert e's down matrix multiplied by its factor, an unscaled layer gives the same.
TEST(OutputScales, MultiplyOutputsInTrainingOnly) {
  for (const auto stage : {WeightStage::output, WeightStage::activation}) {
    auto options = scaled_options(GradientScale::global);
    options.weight_stage = stage;
    LayerAlone scaled(options);
    options.gradient_scale = GradientScale::off;
    LayerAlone plain(options);
    const Tensor x = Random(3).tensor({31, 20}, Dtype::f32);
    const Tensor d_y = Random(4).tensor({31, 20}, Dtype::f32);
    SavedForBackward saved;
    const Tensor y = scaled.layer.forward(scaled.weights, {.x = x}, saved);
    EXPECT_TRUE(same_bits(scaled.layer.forward(scaled.weights, {.x = x}),
                          plain.layer.forward(plain.weights, {.x = x})));
    EXPECT_FALSE(same_bits(y, plain.layer.forward(plain.weights, {.x = x})));

    std::vector<std::int64_t> picks(6, 0);
    for (const auto id : saved.routing().expert_ids.span<std::int32_t>()) {
      ++picks[static_cast<std::size_t>(id)];
    }
    const auto factors =
        output_scales(GradientScale::global, picks, ExpertPlacement::contiguous(6, 1));
    for (std::size_t e = 0; e < factors.size(); ++e) {
      Tensor down = testing::copy_of(plain.weights.experts[e].down);
      for (float& v : down.span<float>()) v *= factors[e];
      plain.weights.experts[e].down = down;
    }
    SavedForBackward expected_saved;
    EXPECT_TRUE(near(y, plain.layer.forward(plain.weights, {.x = x}, expected_saved), 1e-6));
    const auto actual = backward(scaled, saved, d_y);
    const auto expected = backward(plain, expected_saved, d_y);
    EXPECT_TRUE(near(actual.d_x, expected.d_x, 2e-6));
    EXPECT_TRUE(near(actual.d_weights, expected.d_weights, 2e-6));
    EXPECT_TRUE(near(actual.gradients.router.gate, expected.gradients.router.gate, 2e-6));
    for (std::size_t e = 0; e < factors.size(); ++e) {
      EXPECT_TRUE(near(testing::copy_of(actual.gradients.experts[e].up),
                       testing::copy_of(expected.gradients.experts[e].up), 2e-6));
    }
  }
}

class OutputScalesOnRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(OutputScalesOnRanks, GlobalOnesHaveTheBitsOfOneRank) {
  on_ranks(GetParam(), [](Communicator& comm) {
    auto options = scaled_options(GradientScale::global);
    LayerAlone alone(options);
    const Tensor x = Random(3).tensor({500, 20}, Dtype::f32);
    const Tensor d_y = Random(4).tensor({500, 20}, Dtype::f32);
    SavedForBackward saved;
    const Tensor expected_y = alone.layer.forward(alone.weights, {.x = x}, saved);
    const auto expected = backward(alone, saved, d_y);

    const auto piece = awkward_piece(comm, 500);
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    const auto weights = part_of(alone.weights, placement, comm.rank());
    for (const MoverKind mover : movers_of(comm)) {
      options.mover = mover;
      MoeLayer layer(comm, placement, options);
      const Tensor y = layer.forward(weights, {.x = piece.of(x)}, saved);
      EXPECT_TRUE(on_all(comm, same_bits(y, piece.of(expected_y))));
      Tensor d_x({piece.last - piece.first, 20}, Dtype::f32);
      const auto gradients = gradients_for(weights);
      layer.backward(weights, saved, piece.of(d_y), {.d_x = d_x, .gradients = gradients});
      EXPECT_TRUE(on_all(comm, same_bits(d_x, piece.of(expected.d_x))));
      const auto mine = placement.experts_of(comm.rank());
      for (std::size_t i = 0; i < mine.size(); ++i) {
        expect_same_bits(gradients.experts[i],
                         expected.gradients.experts[static_cast<std::size_t>(mine[i])]);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OutputScalesOnRanks, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::output_scales_test
