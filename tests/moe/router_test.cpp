// SPDX-License-Identifier: Apache-2.0
// Routers against the reference: choices, weights and gradients.
#include "switchyard/router.h"

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/random.h"

namespace switchyard::router_test {
namespace {

using testing::Doubles;
using testing::doubles_of;
using testing::near;
using testing::Random;
using testing::same_bits;
using testing::tensor_of;

struct Case {
  std::string name;
  RouterOptions options;
  bool gate_bias = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  std::vector<Case> result{{"mixtral", RouterOptions::mixtral(8, 2)},
                           {"qwen3_moe", RouterOptions::qwen3_moe(16, 4)},
                           {"olmoe", RouterOptions::olmoe(16, 4)},
                           {"deepseek_v3", RouterOptions::deepseek_v3(32, 4)},
                           {"torchtitan", RouterOptions::torchtitan(8, 3)},
                           {"kempner_forge_softmax", RouterOptions::kempner_forge_softmax(8, 2)},
                           {"kempner_forge_sigmoid", RouterOptions::kempner_forge_sigmoid(8, 2)}};
  auto options = RouterOptions::mixtral(12, 3);
  result.push_back({"gate_bias", options, true});
  options.scale = -0.75F;
  result.push_back({"scale", options});
  options.num_expert_groups = 3;
  result.push_back({"one_group_kept", options});
  options.num_expert_groups = 12;
  options.kept_expert_groups = 5;
  result.push_back({"groups_of_one", options});
  options.score_bias = ScoreBias::choice;
  result.push_back({"softmax_with_choice_bias", options, true});
  options.score_bias = ScoreBias::logits;
  result.push_back({"softmax_with_logit_bias", options, true});
  options = RouterOptions::torchtitan(9, 9);
  result.push_back({"every_expert", options, true});
  options = RouterOptions::mixtral(7, 3);
  options.choice = Choice::balanced;
  result.push_back({"balanced", options});
  return result;
}

// Random inputs for a router; the views own their memory.
struct Problem {
  Problem(const RouterOptions& options, std::int64_t num_tokens, std::int64_t hidden,
          bool gate_bias = false, Dtype dtype = Dtype::f32) {
    Random random(3);
    const std::int64_t num_experts = options.num_experts;
    x = random.tensor({num_tokens, hidden}, dtype);
    weights.gate = random.tensor({num_experts, hidden}, dtype).view();
    if (gate_bias) weights.gate_bias = random.tensor({num_experts}, dtype).view();
    if (options.score_bias != ScoreBias::none) {
      weights.score_bias = random.tensor({num_experts}, Dtype::f32).view();
    }
    d_weights = random.tensor({num_tokens, options.top_k}, Dtype::f32);
    d_x = random.tensor({num_tokens, hidden}, dtype);
  }

  Tensor x, d_weights, d_x;
  RouterWeights weights;
};

struct Gradients {
  Tensor d_x, d_gate, d_gate_bias;
};

Gradients backward(const Router& router, const Problem& problem, const Tensor& expert_ids) {
  const std::int64_t num_experts = router.options().num_experts;
  Gradients g{problem.d_x.clone(), Tensor(problem.weights.gate.shape(), Dtype::f32),
              Tensor({num_experts}, Dtype::f32)};
  testing::poison(g.d_gate);
  testing::poison(g.d_gate_bias);
  RouterGradients gradients{.gate = g.d_gate};
  if (problem.weights.gate_bias.data() != nullptr) gradients.gate_bias = g.d_gate_bias;
  router.backward(problem.weights,
                  {.x = problem.x, .expert_ids = expert_ids, .d_weights = problem.d_weights},
                  {.d_x = g.d_x, .gradients = gradients});
  return g;
}

void expect_gradients(const Gradients& actual, const RouterOptions& options, const Problem& problem,
                      const Tensor& expert_ids, double tolerance) {
  auto weights = doubles_of(problem.weights);
  Doubles x = doubles_of(problem.x);
  const Doubles d_weights = doubles_of(problem.d_weights);
  const auto spanned = expert_ids.span<std::int32_t>();
  const std::vector<std::int32_t> ids(spanned.begin(), spanned.end());
  const testing::Loss loss = [&] {
    return testing::dot(testing::reference_replay(options, weights, x, ids), d_weights);
  };
  auto d_x = testing::numeric_gradient(x, loss);
  const auto added_to = doubles_of(problem.d_x);
  for (std::size_t i = 0; i < d_x.values.size(); ++i) d_x.values[i] += added_to.values[i];
  EXPECT_TRUE(near(actual.d_x, tensor_of(d_x), tolerance));
  const auto expected = testing::numeric_gradient(weights, loss);
  EXPECT_TRUE(near(actual.d_gate, tensor_of(expected.gate), tolerance));
  if (expected.gate_bias.is_given()) {
    EXPECT_TRUE(near(actual.d_gate_bias, tensor_of(expected.gate_bias), tolerance));
  }
}

class RouterTest : public ::testing::TestWithParam<Case> {};

TEST_P(RouterTest, PicksAndWeighsAsTheReference) {
  const auto& [name, options, gate_bias] = GetParam();
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Problem problem(options, 40, 24, gate_bias, dtype);
    const Routing routing = Router(options).route(problem.weights, problem.x);
    const auto expected =
        testing::reference_route(options, doubles_of(problem.weights), doubles_of(problem.x));
    const auto ids = routing.expert_ids.span<std::int32_t>();
    EXPECT_EQ(std::vector(ids.begin(), ids.end()), expected.expert_ids);
    EXPECT_TRUE(near(routing.weights, tensor_of(expected.weights), 1e-6));
    EXPECT_EQ(routing.first_non_finite_token, -1);
  }
}

TEST_P(RouterTest, ReplayGivesTheWeightsOfTheChoice) {
  const auto& [name, options, gate_bias] = GetParam();
  const Problem problem(options, 40, 24, gate_bias);
  const Router router(options);
  const Routing routing = router.route(problem.weights, problem.x);
  const Routing replayed = router.replay(problem.weights, problem.x, routing.expert_ids);
  EXPECT_TRUE(same_bits(replayed.expert_ids, routing.expert_ids));
  EXPECT_TRUE(same_bits(replayed.weights, routing.weights));
}

TEST_P(RouterTest, GradientsMatchFiniteDifferences) {
  const auto& [name, options, gate_bias] = GetParam();
  const Problem problem(options, 5, 11, gate_bias);
  const Router router(options);
  const Routing routing = router.route(problem.weights, problem.x);
  expect_gradients(backward(router, problem, routing.expert_ids), options, problem,
                   routing.expert_ids, 1e-5);
}

// Scores so small that they are denormal still tell experts apart.
TEST(RouterTokens, ASecondChoiceFarBehindTheBestIsStillFound) {
  const Tensor x = Tensor::from<float>({1, 1}, {1.0F});
  const Tensor gate = Tensor::from<float>({4, 1}, {95.0F, 5.0F, 2.0F, 7.0F});
  const Routing routing = Router(RouterOptions::mixtral(4, 2)).route({.gate = gate}, x);
  const auto ids = routing.expert_ids.span<std::int32_t>();
  EXPECT_EQ(std::vector(ids.begin(), ids.end()), (std::vector{0, 3}));
}

INSTANTIATE_TEST_SUITE_P(Options, RouterTest, ::testing::ValuesIn(cases()),
                         [](const auto& param) { return param.param.name; });

// bf16 tokens and gates are widened, not rounded further; only d_x is rounded as it is added to.
TEST(Router, GradientsOfBf16AreRoundedOnce) {
  const auto options = RouterOptions::deepseek_v3(16, 3);
  const Problem problem(options, 6, 10, true, Dtype::bf16);
  const Router router(options);
  const Routing routing = router.route(problem.weights, problem.x);
  expect_gradients(backward(router, problem, routing.expert_ids), options, problem,
                   routing.expert_ids, 3e-3);

  Tensor d_gate({16, 10}, Dtype::bf16);
  Tensor d_bias({16}, Dtype::bf16);
  Tensor d_x = problem.d_x.clone();
  router.backward(
      problem.weights,
      {.x = problem.x, .expert_ids = routing.expert_ids, .d_weights = problem.d_weights},
      {.d_x = d_x, .gradients = {d_gate, d_bias}});
  const Gradients in_f32 = backward(router, problem, routing.expert_ids);
  for (std::size_t i = 0; i < d_gate.span<Bfloat16>().size(); ++i) {
    ASSERT_EQ(d_gate.span<Bfloat16>()[i].bits, to_bfloat16(in_f32.d_gate.span<float>()[i]).bits);
  }
  EXPECT_TRUE(near(d_bias, in_f32.d_gate_bias, 3e-3));
}

TEST(Router, ReplayTakesMissingPicks) {
  for (const auto& options : {RouterOptions::mixtral(6, 3), RouterOptions::olmoe(6, 3),
                              RouterOptions::kempner_forge_sigmoid(6, 3)}) {
    const Problem problem(options, 5, 11);
    const Router router(options);
    const Tensor ids =
        Tensor::from<std::int32_t>({5, 3}, {3, -1, 1, -1, -1, -1, 5, 4, 0, -1, -1, 2, 1, 0, -1});
    const Routing routing = router.replay(problem.weights, problem.x, ids);
    EXPECT_TRUE(same_bits(routing.expert_ids, ids));
    const auto spanned = ids.span<std::int32_t>();
    const std::vector<std::int32_t> given(spanned.begin(), spanned.end());
    const auto expected = testing::reference_replay(options, doubles_of(problem.weights),
                                                    doubles_of(problem.x), given);
    EXPECT_TRUE(near(routing.weights, tensor_of(expected), 1e-6));
    EXPECT_EQ(routing.weights.span<float>()[1], 0.0F);
    expect_gradients(backward(router, problem, ids), options, problem, ids, 1e-5);
  }
}

// A pick that is given twice counts twice, also in the gradient.
TEST(Router, ReplayTakesRepeatedPicks) {
  const auto options = RouterOptions::mixtral(6, 3);
  const Problem problem(options, 2, 11);
  const Tensor ids = Tensor::from<std::int32_t>({2, 3}, {4, 1, 4, 0, 0, 5});
  expect_gradients(backward(Router(options), problem, ids), options, problem, ids, 1e-5);
}

TEST(Router, AccumulatesWhereAsked) {
  const auto options = RouterOptions::mixtral(6, 2);
  const Problem problem(options, 9, 20, true);
  const Router router(options);
  const Routing routing = router.route(problem.weights, problem.x);
  Gradients g = backward(router, problem, routing.expert_ids);
  const Tensor once = g.d_gate.clone();
  const Tensor bias_once = g.d_gate_bias.clone();
  router.backward(
      problem.weights,
      {.x = problem.x, .expert_ids = routing.expert_ids, .d_weights = problem.d_weights},
      {.d_x = g.d_x, .gradients = {g.d_gate, g.d_gate_bias}, .mode = GradientMode::accumulate});
  for (std::size_t i = 0; i < once.span<float>().size(); ++i) {
    ASSERT_EQ(g.d_gate.span<float>()[i], 2.0F * once.span<float>()[i]);
  }
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(g.d_gate_bias.span<float>()[i], 2.0F * bias_once.span<float>()[i]);
  }
}

TEST(Router, NoTokensGiveNoPicksAndZeroGradients) {
  const auto options = RouterOptions::mixtral(6, 2);
  const Problem problem(options, 0, 20, true);
  const Router router(options);
  const Routing routing = router.route(problem.weights, problem.x);
  EXPECT_EQ(routing.expert_ids.shape(), (Shape{0, 2}));
  EXPECT_EQ(routing.first_non_finite_token, -1);
  const Gradients g = backward(router, problem, routing.expert_ids);
  EXPECT_TRUE(same_bits(g.d_gate, Tensor::zeros({6, 20}, Dtype::f32)));
  EXPECT_TRUE(same_bits(g.d_gate_bias, Tensor::zeros({6}, Dtype::f32)));
}

}  // namespace
}  // namespace switchyard::router_test
