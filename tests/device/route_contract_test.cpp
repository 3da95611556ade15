// SPDX-License-Identifier: Apache-2.0
// Routing on every device: choices, weights and problems.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/route_problem.h"
#include "support/random.h"

namespace switchyard::route_contract_test {
namespace {

using testing::Doubles;
using testing::near;
using testing::Random;
using testing::reference_replay;
using testing::reference_route;
using testing::route_cases;
using testing::route_on;
using testing::RouteInputs;
using testing::RouteResult;
using testing::same_bits;
using testing::set_element;
using testing::tensor_of;

class RouteContract : public testing::OnDevices {};
SWITCHYARD_ON_DEVICES(RouteContract);

std::vector<std::int32_t> ids_of(const RouteResult& result) {
  const auto ids = result.expert_ids.span<std::int32_t>();
  return {ids.begin(), ids.end()};
}

// A choice may differ from the reference only if the compared scores are nearly equal.
void expect_choice(RouteInputs& inputs, const std::vector<std::int32_t>& actual) {
  const auto& options = inputs.test.options;
  const auto expected = reference_route(options, inputs.reference_router(), inputs.reference_x());
  const Doubles scores = inputs.reference_scores();
  const auto compared = [&](std::size_t i, std::int32_t id) {
    const bool biased = options.score_bias == ScoreBias::choice && inputs.score_bias;
    return scores.row(static_cast<std::int64_t>(i) / options.top_k)[id] +
           (biased ? inputs.score_bias->span<float>()[static_cast<std::size_t>(id)] : 0.0F);
  };
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected.expert_ids[i]) continue;
    ASSERT_TRUE(0 <= actual[i] && actual[i] < options.num_experts) << actual[i];
    EXPECT_NEAR(compared(i, actual[i]), compared(i, expected.expert_ids[i]), 1e-6)
        << "pick " << i << " is " << actual[i] << " instead of " << expected.expert_ids[i];
  }
}

TEST_P(RouteContract, PicksAndWeightsAreTheReferences) {
  for (const auto& test : route_cases()) {
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    const auto result = route_on(device, inputs);
    const auto ids = ids_of(result);
    expect_choice(inputs, ids);
    const auto expected =
        reference_replay(test.options, inputs.reference_router(), inputs.reference_x(), ids);
    EXPECT_TRUE(near(result.weights, tensor_of(expected), 1e-5));
    const auto problems = result.problems.span<std::int64_t>();
    EXPECT_EQ(problems[kNonFiniteToken], -1);
    EXPECT_EQ(problems[kBadToken], -1);
  }
}

TEST_P(RouteContract, EqualScoresGoToTheLowerId) {
  for (const auto& options : {RouterOptions::mixtral(70, 5), RouterOptions::torchtitan(1100, 5)}) {
    RouteInputs inputs({"ties", options, 9, 16});
    inputs.score_bias.reset();
    const std::int64_t experts = options.num_experts;
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t h = 0; h < 16; ++h)
        set_element(inputs.gate, e, h, e % 2 == 0 ? 0.5F : 0.25F);
    }
    for (std::int64_t h = 0; h < 16; ++h) set_element(inputs.x, 4, h, 1.0F);
    const auto ids = ids_of(route_on(device, inputs));
    EXPECT_EQ(std::vector(ids.begin() + 20, ids.begin() + 25),
              (std::vector<std::int32_t>{0, 2, 4, 6, 8}));
  }
}

TEST_P(RouteContract, BitsAreTheSameInEveryRunAndForATokenAlone) {
  auto cases = route_cases();
  // Enough tokens and experts for a GPU to compute their logits in another way.
  cases.push_back(
      {"many_tiles", RouterOptions::qwen3_moe(1024, 8), 2200, 64, Dtype::bf16, Dtype::bf16});
  for (const auto& test : cases) {
    if (test.options.choice == Choice::balanced) continue;  // goes by the token's place
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    const auto first = route_on(device, inputs);
    const auto again = route_on(device, inputs);
    EXPECT_TRUE(same_bits(again.expert_ids, first.expert_ids));
    EXPECT_TRUE(same_bits(again.weights, first.weights));
    const auto last = test.num_tokens - 1;
    RouteInputs alone(test);
    alone.test.num_tokens = 1;
    alone.x = Device().copy_of(inputs.x.view().slice(last, last + 1));
    const auto one = route_on(device, alone);
    EXPECT_TRUE(same_bits(one.expert_ids, first.expert_ids.view().slice(last, last + 1)));
    EXPECT_TRUE(same_bits(one.weights, first.weights.view().slice(last, last + 1)));
  }
}

TEST_P(RouteContract, PaddingAndTokensThatAreNotFiniteHaveNoPicks) {
  for (const auto& test : route_cases()) {
    if (test.num_tokens < 12) continue;
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    const auto clean = route_on(device, inputs);
    inputs.pad_every_third();
    set_element(inputs.x, 11, 1, std::numeric_limits<float>::infinity());
    set_element(inputs.x, 8, 1, std::numeric_limits<float>::quiet_NaN());
    const auto result = route_on(device, inputs);
    EXPECT_EQ(result.problems.span<std::int64_t>()[kNonFiniteToken], 8);
    for (std::int64_t t = 0; t < test.num_tokens; ++t) {
      const auto ids = result.expert_ids.view().slice(t, t + 1);
      const auto weights = result.weights.view().slice(t, t + 1);
      if (t % 3 != 0 && t != 8 && t != 11) {
        EXPECT_TRUE(same_bits(ids, clean.expert_ids.view().slice(t, t + 1)));
        EXPECT_TRUE(same_bits(weights, clean.weights.view().slice(t, t + 1)));
        continue;
      }
      for (const auto id : ids.span<std::int32_t>()) EXPECT_EQ(id, -1);
      for (const auto weight : weights.span<float>()) EXPECT_EQ(weight, 0.0F);
    }
  }
}

TEST_P(RouteContract, ReplayedIdsAreWeighed) {
  for (const auto& test : route_cases()) {
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    Random random(5);
    inputs.expert_ids = random.expert_ids({.num_tokens = test.num_tokens,
                                           .top_k = test.options.top_k,
                                           .num_experts = test.options.num_experts,
                                           .none = 0.2});
    for (const BadIds bad_ids : {BadIds::stay, BadIds::become_none}) {
      inputs.bad_ids = bad_ids;
      const auto result = route_on(device, inputs);
      EXPECT_TRUE(same_bits(result.expert_ids, *inputs.expert_ids));
      EXPECT_TRUE(near(result.weights,
                       tensor_of(reference_replay(test.options, inputs.reference_router(),
                                                  inputs.reference_x(), ids_of(result))),
                       1e-5));
      EXPECT_EQ(result.problems.span<std::int64_t>()[kBadToken], -1);
    }
  }
}

TEST_P(RouteContract, BadIdsStayOrBecomeNone) {
  struct Bad {
    std::int64_t k;
    std::int32_t id;
    std::int64_t is_duplicate;
  };
  const auto options = RouterOptions::qwen3_moe(200, 70);
  // Id 64 is a repeat of k = 64's from far and near, by the ids below.
  for (const auto& bad :
       {Bad{69, 64, 1}, Bad{69, 3, 1}, Bad{1, 0, 1}, Bad{40, 200, 0}, Bad{33, -2, 0}}) {
    RouteInputs inputs({"bad", options, 6, 16});
    std::vector<std::int32_t> ids;
    for (std::int32_t i = 0; i < 6 * 70; ++i) ids.push_back(i % 70);
    ids[static_cast<std::size_t>(2 * 70 + bad.k)] = bad.id;
    ids[4 * 70] = 1000;  // later: not the first
    inputs.expert_ids = Tensor::from<std::int32_t>({6, 70}, ids);
    const auto stays = route_on(device, inputs);
    EXPECT_EQ(ids_of(stays), ids);
    EXPECT_EQ(stays.problems.span<std::int64_t>()[kBadToken], -1);
    inputs.bad_ids = BadIds::become_none;
    const auto cleaned = route_on(device, inputs);
    const auto words = cleaned.problems.span<std::int64_t>();
    EXPECT_EQ(std::vector(words.begin(), words.end()),
              (std::vector<std::int64_t>{-1, 2, bad.k, bad.id, bad.is_duplicate}));
    ids[static_cast<std::size_t>(2 * 70 + bad.k)] = -1;
    ids[4 * 70] = -1;
    EXPECT_EQ(ids_of(cleaned), ids);
    const auto expected =
        reference_replay(options, inputs.reference_router(), inputs.reference_x(), ids);
    EXPECT_TRUE(near(cleaned.weights, tensor_of(expected), 1e-5));
  }
}

// Nothing of the gate is looked at, and what is counted are picks.
TEST_P(RouteContract, GivenWeightsAreTaken) {
  for (const auto& [top_k, experts, tokens] :
       {std::tuple{2L, 6, 300L}, std::tuple{70L, 200, 9L}, std::tuple{3L, 9000, 65L}}) {
    const auto options = RouterOptions::mixtral(experts, top_k);
    RouteInputs inputs({"given", options, tokens, 16});
    for (std::int64_t h = 0; h < 16; ++h) {
      set_element(inputs.x, 1, h, std::numeric_limits<float>::quiet_NaN());
    }
    Random random(5);
    inputs.expert_ids = random.expert_ids(
        {.num_tokens = tokens, .top_k = top_k, .num_experts = experts, .none = 0.2});
    inputs.given_weights = random.tensor({tokens, top_k + 3}, Dtype::f32);
    inputs.bad_ids = BadIds::become_none;
    inputs.pad_every_third();
    const auto given = inputs.expert_ids->span<std::int32_t>();
    const auto width = static_cast<std::size_t>(top_k);
    given[4 * width] = experts;
    given[5 * width] = given[5 * width + 1] = 1;
    given[6 * width] = -9;  // padding, and so not bad
    Tensor by_sequence = put(Tensor::zeros({1, 2 * std::int64_t{experts} + 1}, Dtype::i64));
    Tensor squares = put(Tensor::zeros({2}, Dtype::i64));
    RouterSums sums{.losses = {},
                    .num_experts = experts,
                    .sequence_tokens = tokens,
                    .by_sequence = by_sequence,
                    .squares = squares};
    const auto result = route_on(device, inputs, &sums);

    std::vector<std::int32_t> ids(given.begin(), given.end());
    std::vector<float> weights(ids.size(), 0.0F);
    std::vector<std::int64_t> counted(2 * static_cast<std::size_t>(experts) + 1, 0);
    ids[4 * width] = -1;
    ids[5 * width + 1] = -1;
    std::replace(ids.begin() + 5 * top_k + 2, ids.begin() + 6 * top_k, 1, -1);
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      counted.back() += t % 3 == 0 ? 0 : 1;
      for (std::size_t i = t * width; i < (t + 1) * width; ++i) {
        if (t % 3 == 0) ids[i] = -1;
        if (ids[i] < 0) continue;
        weights[i] = inputs.given_weights->span<float>()[t * (width + 3) + i % width];
        ++counted[static_cast<std::size_t>(ids[i])];
      }
    }
    EXPECT_EQ(ids_of(result), ids);
    EXPECT_TRUE(same_bits(result.weights, Tensor::from<float>({tokens, top_k}, weights)));
    const auto words = result.problems.span<std::int64_t>();
    EXPECT_EQ(std::vector(words.begin(), words.end()),
              (std::vector<std::int64_t>{-1, 4, 0, experts, 0}));
    const Tensor sum = get(by_sequence);
    EXPECT_EQ(std::vector(sum.span<std::int64_t>().begin(), sum.span<std::int64_t>().end()),
              counted);
  }
}

}  // namespace
}  // namespace switchyard::route_contract_test
