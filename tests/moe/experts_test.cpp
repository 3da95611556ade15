// SPDX-License-Identifier: Apache-2.0
// Experts against the reference: every activation, weight stage and bias, forward and backward.
#include "switchyard/experts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/experts_problem.h"

namespace switchyard::experts_test {
namespace {

using testing::ActivationForm;
using testing::expect_near;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::GradientDtype;
using testing::gradients_for;
using testing::kActivationForms;
using testing::near;
using testing::run_experts;
using testing::same_bits;
using testing::tensor_of;

struct Tolerances {
  double forward = 0.0;
  double backward = 0.0;
};
constexpr Tolerances kF32{1e-5, 1e-4};
// A bf16 is rounded by 0.4% at most. A result has two or three such roundings behind it, a gradient
// up to four, and single numbers cancel: 1.1% and 1.8% were the worst seen here.
constexpr Tolerances kBf16{1.5e-2, 2.5e-2};

void expect_reference(const ExpertsProblem& problem, const ExpertsResults& results,
                      const Tolerances& tolerances) {
  const auto offsets = problem.row_offsets.span<std::int32_t>();
  const auto group_rows = problem.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < problem.weights.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    const auto group = [&](const Tensor& rows) {
      return rows.view().slice(offsets[e], offsets[e] + group_rows[e]);
    };
    EXPECT_TRUE(near(group(results.out), reference_out(problem, e), tolerances.forward));
    const auto expected = reference_gradients(problem, e);
    EXPECT_TRUE(near(group(results.d_rows), tensor_of(expected.d_rows), tolerances.backward));
    EXPECT_TRUE(
        near(group(results.d_row_weights), tensor_of(expected.d_row_weights), tolerances.backward));
    expect_near(results.gradients[e], expected.weights, tolerances.backward);
  }
}

struct Case {
  ActivationForm form;
  Dtype dtype;
};
std::string name_of(const Case& c) {
  return testing::name_of(c.form) + "_" + std::string(switchyard::name_of(c.dtype));
}
void PrintTo(const Case& c, std::ostream* out) { *out << name_of(c); }

std::vector<Case> cases() {
  std::vector<Case> result;
  for (const auto& form : kActivationForms) {
    for (const auto dtype : {Dtype::f32, Dtype::bf16}) result.push_back({form, dtype});
  }
  return result;
}

class ExpertsTest : public ::testing::TestWithParam<Case> {
 protected:
  // The clamp is low enough to bite.
  ExpertsOptions options(std::int64_t hidden, std::int64_t intermediate) const {
    return GetParam().form.in(ExpertsOptions{.hidden = hidden,
                                             .intermediate = intermediate,
                                             .dtype = GetParam().dtype,
                                             .clamp_limit = 0.4F});
  }
  Tolerances tolerances() const { return GetParam().dtype == Dtype::f32 ? kF32 : kBf16; }
};

TEST_P(ExpertsTest, EqualTheReference) {
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    for (const auto biases : {Biases::none, Biases::all}) {
      SCOPED_TRACE(std::string(switchyard::name_of(stage)) +
                   (biases == Biases::all ? " with biases" : ""));
      auto o = options(9, 7);
      o.weight_stage = stage;
      const ExpertsProblem problem(o, biases, {3, 0, 1, 5});
      expect_reference(problem, run_experts(problem), tolerances());
      // Gradients of bf16 weights may be f32: nothing is rounded at their end.
      expect_reference(problem, run_experts(problem, {.gradient_dtype = GradientDtype::f32}),
                       tolerances());
    }
  }
}

TEST_P(ExpertsTest, EqualTheReferenceInOddWidths) {
  const ExpertsProblem problem(options(21, 37), Biases::all, {3, 2});  // a line and a part
  expect_reference(problem, run_experts(problem), tolerances());
}

INSTANTIATE_TEST_SUITE_P(All, ExpertsTest, ::testing::ValuesIn(cases()),
                         [](const auto& param) { return name_of(param.param); });

// Around the lengths at which groups are cut into panels.
TEST(Experts, GroupsOfManySizesEqualTheReference) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto stage : {WeightStage::output, WeightStage::input}) {
      const ExpertsOptions options{
          .hidden = 5, .intermediate = 3, .dtype = dtype, .weight_stage = stage};
      const ExpertsProblem problem(options, Biases::all, {0, 1, 15, 16, 17, 255, 256, 257, 600});
      expect_reference(problem, run_experts(problem), dtype == Dtype::f32 ? kF32 : kBf16);
    }
  }
}

// Matrices of more rows than one block of their gradient has.
TEST(Experts, MatricesOfSeveralBlocksEqualTheReference) {
  const ExpertsOptions options{.hidden = 2, .intermediate = 530};
  const ExpertsProblem problem(options, Biases::all, {2});
  expect_reference(problem, run_experts(problem), kF32);
}

// One row, one inner value, weights of 1: out is the activation itself.
struct Point {
  float gate, up;
  double value, d_gate, d_up;
};

Point point_at(float gate, float up, const ExpertsOptions& options) {
  const Dtype dtype = options.dtype;
  const auto scalar = [&](float value, const Shape& shape) {
    return dtype == Dtype::f32 ? Tensor::from<float>(shape, {value})
                               : Tensor::from<Bfloat16>(shape, {to_bfloat16(value)});
  };
  const Shape matrix{1, 1};
  const ExpertWeights expert{.gate = scalar(0, matrix),
                             .up = scalar(0, matrix),
                             .down = scalar(1, matrix),
                             .gate_bias = scalar(gate, {1}),
                             .up_bias = scalar(up, {1})};
  const Tensor offsets = Tensor::from<std::int32_t>({2}, {0, 1});
  const Tensor counts = Tensor::from<std::int32_t>({1}, {1});
  Tensor rows = scalar(1, matrix);
  Tensor out = scalar(0, matrix);
  Tensor inner({1, 2}, dtype);
  const Experts experts(options);
  experts.forward({&expert, 1}, {offsets, counts}, {.rows = rows}, {.out = out, .inner = inner});
  const auto gradients = gradients_for(expert, GradientDtype::f32);
  const double value = testing::doubles_of(out.view()).values[0];
  Tensor d_rows = scalar(0, matrix);
  experts.backward({&expert, 1}, {offsets, counts},
                   {.rows = rows, .inner = inner, .d_out = scalar(1, matrix)},
                   {.d_rows = d_rows, .gradients = {&gradients, 1}});
  return {gate, up, value, gradients.gate_bias.span<float>()[0],
          gradients.up_bias.span<float>()[0]};
}

// `options` have all but sizes and dtype.
void expect_points(ExpertsOptions options, std::span<const Point> points) {
  options.hidden = options.intermediate = 1;
  for (const Point& expected : points) {
    SCOPED_TRACE(std::to_string(expected.gate) + ", " + std::to_string(expected.up));
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      options.dtype = dtype;
      const Point actual = point_at(expected.gate, expected.up, options);
      const double tolerance = dtype == Dtype::f32 ? 1e-6 : 5e-3;
      EXPECT_NEAR(actual.value, expected.value, tolerance * std::abs(expected.value));
      EXPECT_NEAR(actual.d_gate, expected.d_gate, tolerance * std::abs(expected.d_gate));
      EXPECT_NEAR(actual.d_up, expected.d_up, tolerance * std::abs(expected.d_up));
    }
  }
}

// g · sigmoid(1.702 · g) · (u + 1), by hand. At the limit a value still counts as inside.
TEST(ClampedSwiglu, ClampsAtItsLimits) {
  const Point points[]{
      {0.0F, 3.0F, 0.0, 2.0, 0.0},
      {1.0F, 0.0F, 0.84579577, 1.0677796, 0.84579577},
      {7.0F, 1.0F, 13.999906, 2.0001462, 6.9999531},
      {7.5F, 1.0F, 13.999906, 0.0, 6.9999531},                     // the gate is cut above
      {-8.0F, 1.0F, -1.9532858e-5, -3.0803276e-5, -9.7664289e-6},  // and not below
      {2.0F, 7.0F, 15.485269, 8.5905228, 1.9356586},
      {2.0F, 9.0F, 15.485269, 8.5905228, 0.0},  // up is cut above
      {2.0F, -7.0F, -11.613952, -6.4428921, 1.9356586},
      {2.0F, -7.25F, -11.613952, -6.4428921, 0.0},  // and below
  };
  expect_points({.activation = Activation::clamped_swiglu, .clamp_limit = 7.0F}, points);
}

// g · sigmoid(g) · u, by hand.
TEST(ClampedSwiglu, TakesTheNumbersOfDeepSeek) {
  const Point points[]{
      {1.0F, 0.0F, 0.0, 0.0, 0.73105858},
      {2.0F, 3.0F, 5.2847825, 3.2723527, 1.7615942},
      {11.0F, 3.0F, 29.998638, 0.0, 9.999546},
      {2.0F, -11.0F, -17.615942, -10.907842, 0.0},
  };
  expect_points({.activation = Activation::clamped_swiglu,
                 .clamp_limit = 10.0F,
                 .gate_alpha = 1.0F,
                 .up_offset = 0.0F},
                points);
}

TEST(ClampedSwiglu, IsSwigluWithoutALimit) {
  ExpertsOptions options{.hidden = 9,
                         .intermediate = 37,
                         .activation = Activation::clamped_swiglu,
                         .clamp_limit = std::numeric_limits<float>::infinity(),
                         .gate_alpha = 1.0F,
                         .up_offset = 0.0F};
  const auto clamped = run_experts(ExpertsProblem(options, Biases::all, {3, 2}));
  options.activation = Activation::swiglu;
  const auto expected = run_experts(ExpertsProblem(options, Biases::all, {3, 2}));
  EXPECT_TRUE(same_bits(clamped.out, expected.out));
  EXPECT_TRUE(same_bits(clamped.d_rows, expected.d_rows));
  EXPECT_TRUE(same_bits(clamped.d_row_weights, expected.d_row_weights));
}

// min(silu(g), 32) · u, by hand. Silu is 32 at 32, to the bit; there it still counts as inside.
TEST(LimitedSwiglu, ClampsAtItsLimits) {
  const Point points[]{
      {32.0F, 2.0F, 64.0, 2.0, 32.0},
      {33.0F, 2.0F, 64.0, 0.0, 32.0},                              // the gate is cut above
      {-8.0F, 2.0F, -5.3656021e-3, -4.6931025e-3, -2.6828010e-3},  // and not below
      {1.0F, 32.0F, 23.393875, 29.685456, 0.73105858},
      {1.0F, 40.0F, 23.393875, 29.685456, 0.0},  // up is cut above
      {1.0F, -32.0F, -23.393875, -29.685456, 0.73105858},
      {1.0F, -40.0F, -23.393875, -29.685456, 0.0},  // and below
  };
  expect_points({.activation = Activation::limited_swiglu, .clamp_limit = 32.0F}, points);
}

// At its kink a gate has no gradient, as in torch.
TEST(Reglu, HasNoGradientWithoutAGate) {
  const Point points[]{
      {-1.0F, 3.0F, 0.0, 0.0, 0.0}, {0.0F, 3.0F, 0.0, 0.0, 0.0}, {0.5F, 3.0F, 1.5, 3.0, 0.5}};
  expect_points({.activation = Activation::reglu}, points);
}

}  // namespace
}  // namespace switchyard::experts_test
