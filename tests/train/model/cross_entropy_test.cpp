// SPDX-License-Identifier: Apache-2.0
// The loss against double precision, and its gradient against central differences.
#include "model/cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"

namespace switchyard::train::cross_entropy_test {
namespace {

using testing::Doubles;
using testing::doubles_of;
using testing::Random;

double reference(const Doubles& logits, const std::vector<std::uint8_t>& targets) {
  double loss = 0.0;
  for (std::int64_t t = 0; t < logits.rows(); ++t) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < logits.shape[1]; ++i) sum += std::exp(logits.row(t)[i]);
    loss += std::log(sum) - logits.row(t)[targets[static_cast<std::size_t>(t)]];
  }
  return loss;
}

std::vector<std::uint8_t> random_targets(std::int64_t tokens, std::int64_t vocabulary) {
  Random random(7);
  std::vector<std::uint8_t> targets;
  for (std::int64_t t = 0; t < tokens; ++t) {
    targets.push_back(static_cast<std::uint8_t>(random.below(vocabulary)));
  }
  return targets;
}

TEST(CrossEntropy, EqualsReferenceAndItsDifferences) {
  for (const std::int64_t vocabulary : {1, 5, 40}) {
    Tensor logits = Random(1).tensor({6, vocabulary}, Dtype::f32);
    const auto targets = random_targets(6, vocabulary);
    Doubles exact = doubles_of(logits);
    const double expected = reference(exact, targets);
    Compute compute{Device()};
    EXPECT_NEAR(cross_entropy(compute, logits, targets), expected, 1e-6);
    const float scale = 0.25F;
    EXPECT_NEAR(cross_entropy_with_gradient(compute, logits, targets, scale), expected, 1e-6);
    const auto gradient = testing::numeric_gradient(
        exact, [&] { return static_cast<double>(scale) * reference(exact, targets); });
    EXPECT_TRUE(testing::within(logits, testing::tensor_of(gradient), 1e-7));
  }
}

// exp(1000) is no float: only differences from the largest logit count.
TEST(CrossEntropy, TakesLargeLogits) {
  Tensor logits = Tensor::from<float>({2, 3}, {1000.0F, 999.0F, -1000.0F, -500.0F, 0.0F, -3e38F});
  const std::vector<std::uint8_t> targets{1, 0};
  Compute compute{Device()};
  const double expected = std::log1p(std::exp(-1.0)) + 1.0 + 500.0;
  EXPECT_NEAR(cross_entropy(compute, logits, targets), expected, 1e-6);
  EXPECT_NEAR(cross_entropy_with_gradient(compute, logits, targets, 1.0F), expected, 1e-6);
  const auto p = static_cast<float>(1.0 / (1.0 + std::exp(-1.0)));
  EXPECT_TRUE(
      testing::within(logits, Tensor::from<float>({2, 3}, {p, -p, 0.0F, -1.0F, 1.0F, 0.0F}), 1e-6));
}

TEST(CrossEntropy, BitsDoNotDependOnThreads) {
  const auto targets = random_targets(301, 256);
  Tensor first = Random(1).tensor({301, 256}, Dtype::f32);
  Tensor second = first.clone();
  Compute one{Device()};
  Compute three(Device::cpu({.num_threads = 3}));
  EXPECT_EQ(cross_entropy(one, first, targets), cross_entropy(three, first, targets));
  EXPECT_EQ(cross_entropy_with_gradient(one, first, targets, 0.1F),
            cross_entropy_with_gradient(three, second, targets, 0.1F));
  EXPECT_TRUE(testing::same_bits(second, first));
}

TEST(CrossEntropy, NoTokensHaveNoLoss) {
  Tensor logits({0, 256}, Dtype::f32);
  Compute compute{Device()};
  EXPECT_EQ(cross_entropy(compute, logits, {}), 0.0);
  EXPECT_EQ(cross_entropy_with_gradient(compute, logits, {}, 1.0F), 0.0);
}

}  // namespace
}  // namespace switchyard::train::cross_entropy_test
