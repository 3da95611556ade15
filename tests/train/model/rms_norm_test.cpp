// SPDX-License-Identifier: Apache-2.0
// RMSNorm against double precision, and its gradients against central differences.
#include "model/rms_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"

namespace switchyard::train::rms_norm_test {
namespace {

using testing::Doubles;
using testing::doubles_of;
using testing::near;
using testing::Random;
using testing::same_bits;
using testing::tensor_of;

constexpr double kTolerance = 1e-5;  // f32 sums of some hundred terms

Doubles reference(const Doubles& x, const Doubles& weight) {
  Doubles y = testing::zeros(x.shape);
  const auto hidden = x.shape[1];
  for (std::int64_t t = 0; t < x.rows(); ++t) {
    double squares = 0.0;
    for (std::int64_t h = 0; h < hidden; ++h) squares += x.row(t)[h] * x.row(t)[h];
    const double rms = std::sqrt(squares / static_cast<double>(hidden) + 1e-5);
    for (std::int64_t h = 0; h < hidden; ++h) y.row(t)[h] = x.row(t)[h] / rms * weight.values[h];
  }
  return y;
}

struct Problem {
  Problem(std::int64_t tokens, std::int64_t hidden)
      : x(Random(1).tensor({tokens, hidden}, Dtype::f32)),
        weight(Random(2).tensor({hidden}, Dtype::f32)),
        d_y(Random(3).tensor({tokens, hidden}, Dtype::f32)),
        y({tokens, hidden}, Dtype::f32),
        inverse_rms({tokens}, Dtype::f32),
        d_x(Random(4).tensor({tokens, hidden}, Dtype::f32)),
        d_weight({hidden}, Dtype::f32) {
    testing::poison(y);
    testing::poison(d_weight);
  }

  void run(int threads) {
    Compute compute(Device::cpu({.num_threads = threads}));
    rms_norm(compute, {x, weight, y, inverse_rms});
    rms_norm_backward(compute, {x, weight, inverse_rms, d_y, d_x, d_weight});
  }

  Tensor x, weight, d_y, y, inverse_rms, d_x, d_weight;
};

TEST(RmsNorm, EqualsReferenceAndItsDifferences) {
  for (const std::int64_t hidden : {1, 7, 33}) {
    Problem problem(5, hidden);
    Doubles x = doubles_of(problem.x);
    Doubles weight = doubles_of(problem.weight);
    const Doubles residual = doubles_of(problem.d_x);
    problem.run(1);
    EXPECT_TRUE(near(problem.y, tensor_of(reference(x, weight)), 1e-6));
    const testing::Loss loss = [&] {
      return testing::dot(reference(x, weight), doubles_of(problem.d_y));
    };
    Doubles d_x = testing::numeric_gradient(x, loss);
    for (std::size_t i = 0; i < d_x.values.size(); ++i) d_x.values[i] += residual.values[i];
    EXPECT_TRUE(near(problem.d_x, tensor_of(d_x), kTolerance));
    EXPECT_TRUE(
        near(problem.d_weight, tensor_of(testing::numeric_gradient(weight, loss)), kTolerance));
  }
}

TEST(RmsNorm, BitsDoNotDependOnThreads) {
  Problem one(300, 130);
  Problem three(300, 130);
  one.run(1);
  three.run(3);
  EXPECT_TRUE(same_bits(three.y, one.y));
  EXPECT_TRUE(same_bits(three.d_x, one.d_x));
  EXPECT_TRUE(same_bits(three.d_weight, one.d_weight));
}

TEST(RmsNorm, NoTokensGiveZeroGradients) {
  Problem problem(0, 9);
  problem.run(2);
  EXPECT_TRUE(same_bits(problem.d_weight, Tensor::zeros({9}, Dtype::f32)));
}

TEST(RmsNorm, ARowOfZerosStaysZero) {
  Problem problem(1, 9);
  problem.x = Tensor::zeros({1, 9}, Dtype::f32);
  problem.run(1);
  EXPECT_TRUE(same_bits(problem.d_weight, Tensor::zeros({9}, Dtype::f32)));
  EXPECT_TRUE(testing::within(problem.y, Tensor::zeros({1, 9}, Dtype::f32), 0.0));
}

}  // namespace
}  // namespace switchyard::train::rms_norm_test
