// SPDX-License-Identifier: Apache-2.0
#include "switchyard/load_balancer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "support/compare.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/error.h"
#include "switchyard/safetensors.h"

namespace switchyard::load_balancer_test {
namespace {

using testing::error_of;
using testing::near;
using testing::Random;
using testing::same_bits;

using Counts = std::vector<std::int64_t>;

constexpr float kRate = 0.125F;  // so that everything below is exact

TEST(LoadBalancer, SignRuleMovesEveryExpertByTheRate) {
  LoadBalancer balancer(4, {.rate = kRate});
  Tensor bias = Tensor::zeros({4}, Dtype::f32);
  balancer.update(Counts{7, 1, 2, 2}, 0, bias);  // the mean is 3: signs −1, 1, 1, 1, mean 1/2
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({4}, {-0.1875F, 0.0625F, 0.0625F, 0.0625F})));
  balancer.update(Counts{3, 3, 3, 3}, 1, bias);  // all even: nothing to do
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({4}, {-0.1875F, 0.0625F, 0.0625F, 0.0625F})));
  balancer.update(Counts{3, 4, 2, 3}, 2, bias);  // the mean is 3: two of them are there
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({4}, {-0.1875F, -0.0625F, 0.1875F, 0.0625F})));
}

TEST(LoadBalancer, SignRuleComparesWithTheMeanExactly) {
  LoadBalancer balancer(2, {.rate = kRate});
  Tensor bias = Tensor::zeros({2}, Dtype::f32);
  const std::int64_t many = std::int64_t{1} << 60;  // where neither float nor double has ones
  balancer.update(Counts{many, many + 1}, 0, bias);
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({2}, {kRate, -kRate})));
}

TEST(LoadBalancer, MovingAverageRuleFollowsTheShares) {
  LoadBalancer balancer(4, {.rule = BiasRule::moving_average, .rate = kRate, .decay = 0.5F});
  EXPECT_TRUE(
      same_bits(balancer.moving_average(), Tensor::from<float>({4}, {0.25F, 0.25F, 0.25F, 0.25F})));
  Tensor bias = Tensor::zeros({4}, Dtype::f32);
  balancer.update(Counts{8, 4, 4, 0}, 0, bias);
  EXPECT_TRUE(same_bits(balancer.moving_average(),
                        Tensor::from<float>({4}, {0.375F, 0.25F, 0.25F, 0.125F})));
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({4}, {-0.015625F, 0.0F, 0.0F, 0.015625F})));
}

TEST(LoadBalancer, WithoutAssignmentsNothingChanges) {
  for (const BiasRule rule : {BiasRule::sign, BiasRule::moving_average}) {
    LoadBalancer balancer(3, {.rule = rule});
    Tensor bias = Tensor::from<float>({3}, {1.0F, 2.0F, 3.0F});
    balancer.update(Counts{0, 0, 0}, 0, bias);
    EXPECT_TRUE(same_bits(bias, Tensor::from<float>({3}, {1.0F, 2.0F, 3.0F})));
    EXPECT_EQ(balancer.moving_average().span<float>()[1], 1.0F / 3.0F);
  }
}

TEST(LoadBalancer, RatesOfTheSchedules) {
  const auto rate = [](RateSchedule schedule, std::int64_t step) {
    return LoadBalancer(2, {.rate = 2.0F, .schedule = schedule, .num_steps = 100}).rate(step);
  };
  EXPECT_EQ(rate(RateSchedule::constant, 0), 2.0F);
  EXPECT_EQ(rate(RateSchedule::constant, 1000), 2.0F);
  EXPECT_EQ(rate(RateSchedule::cosine, 0), 2.0F);
  EXPECT_FLOAT_EQ(rate(RateSchedule::cosine, 25), 1.70710678F);  // 1 + √½
  EXPECT_FLOAT_EQ(rate(RateSchedule::cosine, 50), 1.0F);
  EXPECT_EQ(rate(RateSchedule::cosine, 100), 0.0F);
  EXPECT_EQ(rate(RateSchedule::warm_up, 0), 0.0F);
  EXPECT_FLOAT_EQ(rate(RateSchedule::warm_up, 4), 0.8F);
  EXPECT_EQ(rate(RateSchedule::warm_up, 10), 2.0F);
  EXPECT_EQ(rate(RateSchedule::warm_up, 100), 2.0F);
}

TEST(LoadBalancer, UpdatesWithTheRateOfTheStep) {
  LoadBalancer balancer(2, {.rate = kRate, .schedule = RateSchedule::warm_up, .num_steps = 40});
  Tensor bias = Tensor::zeros({2}, Dtype::f32);
  balancer.update(Counts{1, 0}, 0, bias);
  EXPECT_TRUE(same_bits(bias, Tensor::zeros({2}, Dtype::f32)));
  balancer.update(Counts{1, 0}, 2, bias);
  EXPECT_TRUE(same_bits(bias, Tensor::from<float>({2}, {-kRate / 2, kRate / 2})));
}

// Compares with KempnerForge's recordings, in which every rank updated its own bias by its own
// counts.
void expect_as_recorded(const std::string& name, int num_ranks) {
  const auto file = SafetensorsFile::open(SWITCHYARD_GOLDEN "/" + name + ".safetensors");
  for (int r = 0; r < num_ranks; ++r) {
    const auto recorded = [&](const char* what) {
      return file.tensor("rank" + std::to_string(r) + "." + what);
    };
    Counts counts;
    for (const float n : recorded("expert_counts").span<float>()) {
      counts.push_back(static_cast<std::int64_t>(n));
    }
    LoadBalancer balancer(static_cast<int>(counts.size()), {.rule = BiasRule::moving_average});
    Tensor bias = Tensor::zeros({balancer.moving_average().rows()}, Dtype::f32);
    balancer.update(counts, 0, bias);
    EXPECT_TRUE(near(bias, recorded("expert_bias_after"), 1e-4)) << name << ", rank " << r;
    EXPECT_TRUE(near(balancer.moving_average(), recorded("expert_ema_after"), 1e-5))
        << name << ", rank " << r;
  }
}

TEST(LoadBalancer, MovingAverageRuleIsKempnerForges) {
  expect_as_recorded("local_sigmoid", 1);
  expect_as_recorded("ep4_sigmoid", 4);
}

// Tokens with random scores, among which the first experts are liked best.
class SkewedRouter {
 public:
  static constexpr std::size_t kExperts = 8;

  Counts route(std::span<const float> bias) {
    Counts counts(kExperts, 0);
    for (int token = 0; token < 512; ++token) {
      std::vector<float> scores;
      for (std::size_t e = 0; e < kExperts; ++e) {
        scores.push_back(random_.uniform() + 2.0F / static_cast<float>(e + 1) + bias[e]);
      }
      const auto best = std::ranges::max_element(scores) - scores.begin();
      ++counts[static_cast<std::size_t>(best)];
    }
    return counts;
  }

 private:
  Random random_{3};
};

// The fullest expert's share of what an even one would have, over some steps.
double worst_load(SkewedRouter& router, std::span<const float> bias) {
  Counts sum(SkewedRouter::kExperts, 0);
  for (int step = 0; step < 20; ++step) {
    const auto counts = router.route(bias);
    for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += counts[e];
  }
  const auto total = std::accumulate(sum.begin(), sum.end(), std::int64_t{0});
  return static_cast<double>(std::ranges::max(sum)) * SkewedRouter::kExperts /
         static_cast<double>(total);
}

void expect_balanced(const LoadBalancerOptions& options) {
  SCOPED_TRACE(options.rate);
  SkewedRouter router;
  LoadBalancer balancer(SkewedRouter::kExperts, options);
  Tensor bias = Tensor::zeros({SkewedRouter::kExperts}, Dtype::f32);
  EXPECT_GT(worst_load(router, bias.span<float>()), 4.0);
  for (int step = 0; step < 400; ++step) {
    balancer.update(router.route(bias.span<float>()), step, bias);
  }
  EXPECT_LT(worst_load(router, bias.span<float>()), 1.15);
  const auto values = bias.span<float>();
  EXPECT_NEAR(std::accumulate(values.begin(), values.end(), 0.0), 0.0, 1e-4);
}

TEST(LoadBalancer, BothRulesBalanceASkewedRouter) {
  expect_balanced({.rule = BiasRule::sign, .rate = 0.01F});
  expect_balanced({.rule = BiasRule::moving_average, .rate = 0.5F, .decay = 0.5F});
  expect_balanced({.rate = 0.02F, .schedule = RateSchedule::cosine, .num_steps = 400});
}

TEST(LoadBalancer, SignRuleKeepsTheSumOfTheBias) {
  LoadBalancer balancer(5, {});
  Tensor bias = Tensor::zeros({5}, Dtype::f32);
  Random random(9);
  for (int step = 0; step < 1000; ++step) {
    Counts counts;
    for (int e = 0; e < 5; ++e) counts.push_back(random.below(10 * (e + 1)));
    balancer.update(counts, step, bias);
  }
  const auto values = bias.span<float>();
  EXPECT_GT(std::ranges::max(values), 0.1F);
  EXPECT_NEAR(std::accumulate(values.begin(), values.end(), 0.0), 0.0, 1e-5);
}

std::string error_with(const LoadBalancerOptions& options, int num_experts = 4) {
  return error_of<InvalidArgument>([&] { LoadBalancer balancer(num_experts, options); });
}

TEST(LoadBalancerErrors, OfOptions) {
  EXPECT_EQ(error_with({}, 0), "num_experts (0) must be positive");
  EXPECT_EQ(error_with({.rate = -1.0F}), "rate (-1) must be finite and not negative");
  EXPECT_EQ(error_with({.rate = std::numeric_limits<float>::infinity()}),
            "rate (inf) must be finite and not negative");
  EXPECT_EQ(error_with({.decay = 1.0F}), "decay (1) must be at least 0 and less than 1");
  EXPECT_EQ(error_with({.decay = -0.5F}), "decay (-0.5) must be at least 0 and less than 1");
  EXPECT_EQ(error_with({.decay = std::numeric_limits<float>::quiet_NaN()}),
            "decay (nan) must be at least 0 and less than 1");
  for (const auto schedule : {RateSchedule::cosine, RateSchedule::warm_up}) {
    EXPECT_EQ(error_with({.schedule = schedule}),
              "num_steps (0) must be positive when the rate changes during training");
  }
}

TEST(LoadBalancerErrors, OfUpdatesChangeNothing) {
  LoadBalancer balancer(3, {.schedule = RateSchedule::cosine, .num_steps = 10});
  Tensor bias = Tensor::zeros({3}, Dtype::f32);
  const auto error = [&](const Counts& counts, std::int64_t step, const TensorView& score_bias) {
    return error_of<InvalidArgument>([&] { balancer.update(counts, step, score_bias); });
  };
  EXPECT_EQ(error({1, 2}, 0, bias), "there are 2 counts for 3 experts");
  EXPECT_EQ(error({1, 2, -3}, 0, bias), "counts[2] (-3) must not be negative");
  EXPECT_EQ(error({1, 2, 3}, -1, bias), "step (-1) must not be negative");
  EXPECT_EQ(error({1, 2, 3}, 11, bias), "step (11) is beyond num_steps (10)");
  EXPECT_EQ(error({1, 2, 3}, 0, {}), "score_bias [3] is missing");
  EXPECT_EQ(error({1, 2, 3}, 0, Tensor::zeros({4}, Dtype::f32)),
            "score_bias is f32 [4], but must be [3] of f32 or bf16");
  EXPECT_EQ(error({1, 2, 3}, 0, Tensor::zeros({3}, Dtype::bf16)),
            "score_bias is bf16, but must be f32");
  EXPECT_TRUE(same_bits(bias, Tensor::zeros({3}, Dtype::f32)));
}

}  // namespace
}  // namespace switchyard::load_balancer_test
