// SPDX-License-Identifier: Apache-2.0
// Layers that are given the routing weights: those of a router give what that router gives, and any
// others what the reference says.
#include <gtest/gtest.h>

#include <vector>

#include "support/compare.h"
#include "support/errors.h"
#include "support/finite_difference.h"
#include "support/layer/layer_alone.h"
#include "support/layer/layer_step.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "support/wide_ids.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::given_weights_test {
namespace {

using testing::awkward_piece;
using testing::backward;
using testing::doubles_of;
using testing::error_of;
using testing::expect_same_bits;
using testing::gradients_for;
using testing::LayerAlone;
using testing::LayerGradients;
using testing::LayerProblem;
using testing::LayerResults;
using testing::movers_of;
using testing::near;
using testing::on_all;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::small_layer_options;
using testing::tensor_of;

constexpr std::int64_t kTokens = 70;

Tensor picks(const MoeLayerOptions& options) {
  return Random(2).expert_ids({.num_tokens = kTokens,
                               .top_k = options.router.top_k,
                               .num_experts = options.router.num_experts,
                               .skew = 0.4,
                               .none = 0.1});
}

// Every fifth token is padding.
Tensor mask(std::int64_t num_tokens) {
  Tensor valid({num_tokens}, Dtype::i32);
  for (std::size_t t = 0; t < static_cast<std::size_t>(num_tokens); ++t) {
    valid.span<std::int32_t>()[t] = t % 5 == 3 ? 0 : 1;
  }
  return valid;
}

std::vector<MoeLayerOptions> all_options() {
  std::vector<MoeLayerOptions> all(8, small_layer_options());
  for (auto& o : all) o.router = RouterOptions::mixtral(6, 3);
  all[1].dtype = Dtype::bf16;
  all[2].weight_stage = WeightStage::activation;
  all[2].keep = Keep::nothing;
  all[3].weight_stage = WeightStage::input;
  all[4].capacity = {.factor = 0.7, .rule = CapacityRule::first_come};
  all[5].capacity = {.factor = 0.7, .rule = CapacityRule::highest_weight};
  all[6].gradient_scale = GradientScale::global;
  all[6].shared_intermediate = 8;
  all[7].sizing = Sizing::bounded(320);
  all[7].alignment = 16;
  return all;
}

// The gate is zero and only its bias makes weights, so that the router adds nothing to d_x.
TEST(GivenWeights, OfARouterGiveWhatItGives) {
  for (const auto& options : all_options()) {
    LayerAlone alone(options, Biases::all);
    alone.weights.router.gate = Tensor::zeros({6, options.hidden}, options.dtype);
    const Tensor x = Random(3).tensor({kTokens, options.hidden}, options.dtype);
    const Tensor d_y = Random(4).tensor({kTokens, options.hidden}, options.dtype);
    const Tensor ids = picks(options);
    const Tensor valid = mask(kTokens);
    SavedForBackward saved;
    LayerInput in{.x = x, .expert_ids = ids, .valid = valid};
    const Tensor expected_y = alone.layer.forward(alone.weights, in, saved);
    const Tensor weights = saved.routing().weights.clone();
    const LayerGradients expected = backward(alone, saved, d_y);
    const auto expected_picks = alone.layer.take_pick_counts();

    in.expert_weights = weights;
    alone.weights.router = {};
    EXPECT_TRUE(same_bits(alone.layer.forward(alone.weights, in), expected_y) ||
                options.gradient_scale != GradientScale::off);  // which is for training
    EXPECT_TRUE(same_bits(alone.layer.forward(alone.weights, in, saved), expected_y));
    EXPECT_TRUE(same_bits(saved.routing().weights, weights));
    EXPECT_EQ(saved.losses().balance, 0.0F);
    LayerGradients actual = backward(alone, saved, d_y);
    actual.gradients.router = expected.gradients.router;
    expect_same_bits(actual, expected);
    const auto counted = alone.layer.take_pick_counts();
    EXPECT_EQ(counted.picks, expected_picks.picks);
    EXPECT_EQ(counted.num_tokens, expected_picks.num_tokens);
  }
}

TEST(GivenWeights, LeaveTheRoutersGradientsAlone) {
  LayerAlone alone(small_layer_options(), Biases::all);
  const Tensor x = Random(3).tensor({kTokens, 20}, Dtype::f32);
  const Tensor ids = picks(small_layer_options());
  const Tensor weights = Random(5).tensor(ids.shape(), Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x, .expert_ids = ids, .expert_weights = weights},
                            saved);
  const auto g = backward(alone, saved, x);
  const auto untouched = gradients_for(alone.weights).router;
  EXPECT_TRUE(same_bits(g.gradients.router.gate, untouched.gate));
  EXPECT_TRUE(same_bits(g.gradients.router.gate_bias, untouched.gate_bias));
}

// Weights may have either sign and any sum.
TEST(GivenWeights, HaveTheGradientsOfTheReference) {
  for (const WeightStage stage :
       {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    auto options = small_layer_options();
    options.weight_stage = stage;
    options.shared_intermediate = 5;
    LayerAlone alone(options, Biases::all);
    const Tensor x = Random(3).tensor({13, 20}, Dtype::f32);
    const Tensor d_y = Random(4).tensor({13, 20}, Dtype::f32);
    const Tensor ids =
        Random(6).expert_ids({.num_tokens = 13, .top_k = 2, .num_experts = 6, .none = 0.2});
    const Tensor given = Random(5).tensor({13, 2}, Dtype::f32);
    SavedForBackward saved;
    const Tensor y = alone.layer.forward(
        alone.weights, {.x = x, .expert_ids = ids, .expert_weights = given}, saved);
    const auto g = backward(alone, saved, d_y);

    const auto numbers = ids.span<std::int32_t>();
    testing::ReferenceRouting routing{{numbers.begin(), numbers.end()}, doubles_of(given)};
    const auto weights = doubles_of(alone.weights);
    auto tokens = doubles_of(x);
    const auto layer = [&] { return reference_layer(options, weights, tokens, routing); };
    const auto loss = [&] { return dot(layer(), doubles_of(d_y)); };
    EXPECT_TRUE(near(y, tensor_of(layer()), 1e-5));
    EXPECT_TRUE(near(g.d_x, tensor_of(numeric_gradient(tokens, loss)), 1e-5));
    EXPECT_TRUE(near(g.d_weights, tensor_of(numeric_gradient(routing.weights, loss)), 1e-5));
  }
}

// With weights that are given or the router's.
TEST(GivenWeights, WithIdsOf64BitsAndSentinelsGiveTheSame) {
  auto options = small_layer_options();
  options.capacity = {.factor = 0.9};
  options.gradient_scale = GradientScale::global;
  options.sentinel_ids = SentinelIds::allow;
  LayerAlone alone(options, Biases::all);
  const Tensor x = Random(3).tensor({kTokens, 20}, Dtype::f32);
  const Tensor ids = picks(options);
  const Tensor wide = testing::wide_ids(ids, 6);
  const Tensor weights = Random(5).tensor(ids.shape(), Dtype::f32);
  for (const bool given : {true, false}) {
    LayerInput in{.x = x, .expert_ids = ids};
    if (given) in.expert_weights = weights;
    SavedForBackward saved;
    const Tensor expected_y = alone.layer.forward(alone.weights, in, saved);
    const auto expected = backward(alone, saved, x);
    const auto expected_picks = alone.layer.take_pick_counts().picks;
    in.expert_ids = wide;
    EXPECT_TRUE(same_bits(alone.layer.forward(alone.weights, in, saved), expected_y));
    EXPECT_TRUE(same_bits(saved.routing().expert_ids, ids));
    expect_same_bits(backward(alone, saved, x), expected);
    EXPECT_EQ(alone.layer.take_pick_counts().picks, expected_picks);
  }
  options.sentinel_ids = SentinelIds::reject;
  LayerAlone strict(options);
  const auto error = error_of<InvalidArgument>(
      [&] { strict.layer.forward(strict.weights, {.x = x, .expert_ids = wide}); });
  EXPECT_NE(error.find("is 6, which is neither -1 nor an expert of 6"), std::string::npos) << error;
}

TEST(GivenWeights, MayBeStrided) {
  LayerAlone alone(small_layer_options());
  const Tensor x = Random(3).tensor({kTokens, 20}, Dtype::f32);
  const Tensor ids = picks(small_layer_options());
  Tensor wide = Random(5).tensor({kTokens, 5}, Dtype::f32);
  const ConstTensorView weights =
      TensorView(wide.data(), Dtype::f32, {kTokens, 2}, 5, wide.view().owner());
  const Tensor together = testing::copy_of(weights);
  EXPECT_TRUE(same_bits(
      alone.layer.forward(alone.weights, {.x = x, .expert_ids = ids, .expert_weights = weights}),
      alone.layer.forward(alone.weights, {.x = x, .expert_ids = ids, .expert_weights = together})));
}

TEST(GivenWeights, AreRefusedByALayerWithLosses) {
  const auto refused =
      "MoeLayer::forward: expert_weights were given, so there are no router logits for the layer's "
      "losses: make the layer without losses";
  for (const LossOptions& losses :
       {LossOptions{.z = true}, LossOptions{.balance = BalanceLoss::batch}}) {
    auto options = small_layer_options();
    options.losses = losses;
    LayerAlone alone(options);
    const Tensor x = Tensor::zeros({kTokens, 20}, Dtype::f32);
    const Tensor ids = picks(options);
    const Tensor weights = Tensor::zeros(ids.shape(), Dtype::f32);
    const LayerInput in{.x = x, .expert_ids = ids, .expert_weights = weights};
    EXPECT_EQ(error_of<InvalidArgument>([&] { alone.layer.forward(alone.weights, in); }), refused);
  }
}

// A rank may have a router's weights while another is given them.
TEST(GivenWeights, BadIdsAreOneErrorOnAllRanks) {
  for (const bool bounded : {false, true}) {
    run_ranks(3, [&](Communicator& comm) {
      auto options = testing::tiny_layer_options();
      if (bounded) options.sizing = Sizing::bounded(64);
      const auto placement = ExpertPlacement::contiguous(6, 3);
      MoeLayer layer(comm, placement, options);
      const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
      const Tensor x = Random(1).tensor({2, 6}, Dtype::f32);
      const Tensor ids = Tensor::from<std::int32_t>({2, 2}, {0, 3, 1, comm.rank() == 1 ? 7 : 4});
      const Tensor given = Random(2).tensor({2, 2}, Dtype::f32);
      LayerInput in{.x = x, .expert_ids = ids};
      if (comm.rank() > 0) in.expert_weights = given;
      EXPECT_EQ(error_of<InvalidArgument>([&] {
                  SavedForBackward saved;
                  (void)layer.forward(weights, in, saved);
                  layer.check();
                }),
                "rank 1: expert_ids[1,1] is 7, which is neither -1 nor an expert of 6");
      in.expert_ids = Tensor::from<std::int32_t>({2, 2}, {0, 3, 1, -1}).view();
      (void)layer.forward(weights, in);  // nothing is broken
      layer.check();
    });
  }
}

class GivenWeightsOnRanks : public ::testing::TestWithParam<RankCase> {};

LayerResults run_step(Communicator& comm, const LayerProblem& problem,
                      const MoeLayerOptions& options) {
  const auto placement = ExpertPlacement::contiguous(6, comm.size());
  MoeLayer layer(comm, placement, options, Device::cpu({.num_threads = 2}));
  const auto weights = MoeParameters::random(options, placement, comm.rank(), 5, Biases::all);
  return testing::run_step(layer, weights.weights(),
                           input_of(problem, awkward_piece(comm, problem.num_tokens)), Biases::all);
}

TEST_P(GivenWeightsOnRanks, GiveTheBitsOfOneRank) {
  for (const WeightStage stage : {WeightStage::output, WeightStage::activation}) {
    MoeLayerOptions options{.hidden = 48,
                            .intermediate = 40,
                            .router = RouterOptions::mixtral(6, 3),
                            .weight_stage = stage,
                            .shared_intermediate = 24,
                            .gradient_scale = GradientScale::global};
    LayerProblem problem(options);
    problem.weights = Random(8).tensor(problem.ids.shape(), Dtype::f32);
    problem.valid = mask(problem.num_tokens);
    const LayerResults one = run_step(*connect(), problem, options);
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto piece = awkward_piece(comm, problem.num_tokens);
      for (const MoverKind mover : movers_of(comm)) {
        for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(128 * 30)}) {
          auto way = options;
          way.mover = mover;
          way.sizing = sizing;
          EXPECT_TRUE(on_all(comm, same_part(run_step(comm, problem, way), piece, one)))
              << "mover " << static_cast<int>(mover);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, GivenWeightsOnRanks, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::given_weights_test
