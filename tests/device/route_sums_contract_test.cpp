// SPDX-License-Identifier: Apache-2.0
// Routing adds to the sums of losses and statistics, on every device.
#include <gtest/gtest.h>

#include <cmath>

#include "support/device/devices.h"
#include "support/device/route_problem.h"
#include "support/random.h"

namespace switchyard::route_sums_contract_test {
namespace {

using testing::Doubles;
using testing::Random;
using testing::route_cases;
using testing::route_on;
using testing::RouteInputs;
using testing::RouteResult;

class RouteSumsContract : public testing::OnDevices {};
SWITCHYARD_ON_DEVICES(RouteSumsContract);

// Sums over tokens 1, 2, 4, 5, … as the formulas say them.
// `tolerance`: of a sum of scores.
void expect_sums(RouteInputs& inputs, const RouteResult& result, const RouterSums& sums,
                 const Tensor& before, const Tensor& after, double tolerance) {
  const auto& options = inputs.test.options;
  const std::int64_t experts = options.num_experts;
  const Doubles scores = inputs.reference_scores();
  Doubles expected = testing::doubles_of(Tensor::zeros(before.shape(), Dtype::f32));
  for (std::int64_t t = 0; t < inputs.test.num_tokens; ++t) {
    if (t % 3 == 0) continue;
    double* row = expected.row(t / sums.sequence_tokens);
    for (std::int64_t k = 0; k < options.top_k; ++k) {
      row[result.expert_ids
              .span<std::int32_t>()[static_cast<std::size_t>(t * options.top_k + k)]]++;
    }
    double total = 0.0;
    for (std::int64_t e = 0; e < experts; ++e) total += scores.row(t)[e];
    if (sums.losses.scores == LossScores::as_routed) total = 1.0;
    for (std::int64_t e = 0; e < experts && sums.wants_scores(); ++e) {
      row[experts + e] += scores.row(t)[e] / total / RouterSums::kUnit;
    }
    ++row[2 * experts];
  }
  const auto old = before.span<std::int64_t>();
  const auto now = after.span<std::int64_t>();
  for (std::size_t i = 0; i < now.size(); ++i) {
    const auto column = static_cast<std::int64_t>(i) % (2 * experts + 1);
    const bool is_score = experts <= column && column < 2 * experts;
    const auto added = static_cast<double>(now[i] - old[i]);
    EXPECT_NEAR(added, expected.values[i], is_score ? tolerance * expected.values[i] + 1e4 : 0.0)
        << "word " << i;
  }
}

TEST_P(RouteSumsContract, SumsAreAddedToInWholeNumbers) {
  for (const auto& test : route_cases()) {
    for (const auto& losses :
         {LossOptions{}, LossOptions{.balance = BalanceLoss::batch, .z = true},
          LossOptions{.balance = BalanceLoss::sequence, .scores = LossScores::shares}}) {
      SCOPED_TRACE(test.name);
      RouteInputs inputs(test);
      inputs.pad_every_third();
      const std::int64_t words = 2 * std::int64_t{test.options.num_experts} + 1;
      const std::int64_t sequences = (test.num_tokens + 69) / 70;
      Tensor before({sequences, words}, Dtype::i64);
      for (auto& word : before.span<std::int64_t>()) word = Random(3).below(1000);
      Tensor by_sequence = put(before);
      Tensor squares = put(Tensor::from<std::int64_t>({2}, {10, 20}));
      RouterSums sums{.losses = losses,
                      .num_experts = test.options.num_experts,
                      .sequence_tokens = 70,
                      .by_sequence = by_sequence,
                      .squares = squares};
      const auto result = route_on(device, inputs, &sums);
      // Padding is NaN; the reference must not mind.
      inputs.x = RouteInputs(test).x.clone();
      // A logit of some tens is a running sum of `hidden` products in f32, and its error is one of
      // its score. A GPU's tensor cores take f32 as two bf16, which leaves 2⁻¹⁷ of each term.
      const double rounding = std::ldexp(8.0 * std::sqrt(static_cast<double>(test.hidden)), -24);
      const double tolerance = device.memory() == Memory::host ? 1e-6 + rounding : 2e-5;
      expect_sums(inputs, result, sums, before, get(by_sequence), tolerance);
      const auto found = get(squares);
      const auto values = found.span<std::int64_t>();
      double expected = 0.0;
      const auto router = inputs.reference_router();
      const Doubles x = inputs.reference_x();
      for (std::int64_t t = 0; t < test.num_tokens && losses.z; ++t) {
        const double value = testing::reference_log_sum_exp(router, x, t);
        if (t % 3 != 0) expected += value * value;
      }
      EXPECT_NEAR(static_cast<double>(values[0] - 10) +
                      static_cast<double>(values[1] - 20) * RouterSums::kUnit,
                  expected, 1e-5 * expected);
    }
  }
}

TEST_P(RouteSumsContract, NoTokensLeaveTheSumsAlone) {
  RouteInputs inputs({"none", RouterOptions::mixtral(8, 2), 0, 16});
  Tensor by_sequence = put(Tensor::from<std::int64_t>({0, 17}, {}));
  Tensor squares = put(Tensor::from<std::int64_t>({2}, {10, 20}));
  RouterSums sums{.losses = {.balance = BalanceLoss::batch, .z = true},
                  .num_experts = 8,
                  .by_sequence = by_sequence,
                  .squares = squares};
  const auto result = route_on(device, inputs, &sums);
  EXPECT_EQ(result.problems.span<std::int64_t>()[kNonFiniteToken], -1);
  EXPECT_EQ(result.problems.span<std::int64_t>()[kBadToken], -1);
  const auto after = get(squares);
  EXPECT_EQ(after.span<std::int64_t>()[0], 10);
  EXPECT_EQ(after.span<std::int64_t>()[1], 20);
}

}  // namespace
}  // namespace switchyard::route_sums_contract_test
