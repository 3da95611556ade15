// SPDX-License-Identifier: Apache-2.0
// Gradients of experts are added or overwrite; and views of packed weights.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/device/experts_problem.h"

namespace switchyard::experts_gradients_test {
namespace {

using testing::doubles_of;
using testing::expect_near;
using testing::expect_same_bits;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::GradientDtype;
using testing::gradients_for;
using testing::named_tensors;
using testing::run_experts;
using testing::same_bits;

// Backward twice into the same gradients.
ExpertsResults run_twice(const ExpertsProblem& p, GradientDtype dtype) {
  auto results = run_experts(p, {.gradient_dtype = dtype});
  Tensor rows = p.rows.clone();
  Experts(p.options).backward(
      p.weights, p.groups(),
      {.rows = rows, .row_weights = p.row_weights, .inner = results.inner, .d_out = p.d_out},
      {.d_rows = results.d_rows, .gradients = results.gradients, .mode = GradientMode::accumulate});
  return results;
}

TEST(ExpertsGradients, AreAddedToWhatIsThere) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto gradient_dtype : {GradientDtype::as_weights, GradientDtype::f32}) {
      const ExpertsOptions options{.hidden = 20, .intermediate = 12, .dtype = dtype};
      const ExpertsProblem p(options, Biases::all, {17, 40});
      const auto once = run_experts(p, {.gradient_dtype = gradient_dtype});
      const auto twice = run_twice(p, gradient_dtype);
      const bool rounds = dtype == Dtype::bf16 && gradient_dtype == GradientDtype::as_weights;
      for (std::size_t e = 0; e < 2; ++e) {
        auto doubled = doubles_of(ExpertWeights{
            once.gradients[e].gate, once.gradients[e].up, once.gradients[e].down,
            once.gradients[e].gate_bias, once.gradients[e].up_bias, once.gradients[e].down_bias});
        for (auto* tensor : {&doubled.gate, &doubled.up, &doubled.down, &doubled.gate_bias,
                             &doubled.up_bias, &doubled.down_bias}) {
          for (double& v : tensor->values) v *= 2.0;
        }
        expect_near(twice.gradients[e], doubled, rounds ? 3e-3 : 1e-6);
      }
    }
  }
}

TEST(ExpertsGradients, OfExpertsWithoutRowsAreZeroOrUntouched) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const ExpertsOptions options{.hidden = 20, .intermediate = 12, .dtype = dtype};
    const ExpertsProblem p(options, Biases::all, {0, 3, 0});
    auto results = run_experts(p);
    for (const std::size_t e : {0U, 2U}) {
      for (const auto& [name, gradient] : named_tensors(results.gradients[e])) {
        EXPECT_TRUE(same_bits(gradient, Tensor::zeros(gradient.shape(), dtype))) << name;
        testing::poison(gradient);
      }
    }
    Tensor rows = p.rows.clone();
    Experts(options).backward(
        p.weights, p.groups(),
        {.rows = rows, .row_weights = p.row_weights, .inner = results.inner, .d_out = p.d_out},
        {.d_rows = results.d_rows,
         .gradients = results.gradients,
         .mode = GradientMode::accumulate});
    for (const std::size_t e : {0U, 2U}) {
      expect_same_bits(results.gradients[e], gradients_for(p.weights[e]));
    }
  }
}

TEST(ExpertsUnpack, LeavesOutTheGateWhereThereIsNone) {
  const Tensor up = testing::Random(1).tensor({2, 3, 4}, Dtype::f32);
  const Tensor down = testing::Random(2).tensor({2, 4, 3}, Dtype::f32);
  const auto experts = unpack(PackedExperts{.gate_up = up, .down = down}, Activation::gelu);
  ASSERT_EQ(experts.size(), 2U);
  EXPECT_EQ(experts[1].gate.data(), nullptr);
  EXPECT_EQ(experts[1].up.data(), up.data() + 12 * 4);
  EXPECT_EQ(experts[1].up.shape(), (Shape{3, 4}));
  EXPECT_EQ(experts[1].down.data(), down.data() + 12 * 4);
  EXPECT_EQ(experts[1].up_bias.data(), nullptr);
}

}  // namespace
}  // namespace switchyard::experts_gradients_test
