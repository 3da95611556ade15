// SPDX-License-Identifier: Apache-2.0
// The bits of experts' results do not depend on the layout of weights in memory, on threads, or on
// what is recomputed.
#include <gtest/gtest.h>

#include <cstring>

#include "support/compare.h"
#include "support/device/experts_problem.h"

namespace switchyard::experts_bits_test {
namespace {

using testing::expect_same_bits;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::gradients_for;
using testing::run_experts;
using testing::same_bits;
using testing::without_pads;

void expect_same(const ExpertsProblem& problem, const ExpertsResults& a, const ExpertsResults& b) {
  const auto same = [&](const Tensor& of_a, const Tensor& of_b) {
    return same_bits(without_pads(problem, of_a), without_pads(problem, of_b));
  };
  EXPECT_TRUE(same(a.out, b.out));
  EXPECT_TRUE(same(a.inner, b.inner));
  EXPECT_TRUE(same(a.d_rows, b.d_rows));
  EXPECT_TRUE(same(a.d_row_weights, b.d_row_weights));
  for (std::size_t e = 0; e < a.gradients.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_same_bits(a.gradients[e], b.gradients[e]);
  }
}

struct Case {
  Dtype dtype;
  WeightStage stage;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c.dtype) << " " << name_of(c.stage);
}

class ExpertsBitsTest : public ::testing::TestWithParam<Case> {
 protected:
  ExpertsProblem problem() const {
    const ExpertsOptions options{.hidden = 40,
                                 .intermediate = 24,
                                 .dtype = GetParam().dtype,
                                 .weight_stage = GetParam().stage};
    return {options, Biases::all, {17, 0, 300, 1, 64}};
  }
};

TEST_P(ExpertsBitsTest, DoNotDependOnThreads) {
  const auto p = problem();
  const auto one = run_experts(p);
  for (const int num_threads : {2, 4}) {
    const Device device = Device::cpu({.num_threads = num_threads});
    for (int round = 0; round < 2; ++round) {  // with fresh memory and with used
      expect_same(p, run_experts(p, {.device = device}), one);
    }
  }
}

// One panel for one thread: the other finds nothing but gradients to begin with.
TEST_P(ExpertsBitsTest, GradientsWaitForTheirPanels) {
  const ExpertsOptions options{.hidden = 512,
                               .intermediate = 128,
                               .dtype = GetParam().dtype,
                               .weight_stage = GetParam().stage};
  const ExpertsProblem p(options, Biases::all, {256});
  const auto one = run_experts(p);
  const Device device = Device::cpu({.num_threads = 2});
  for (int round = 0; round < 8; ++round) {
    expect_same(p, run_experts(p, {.device = device, .inner_rows = InnerRows::to_be_computed}),
                one);
  }
}

TEST_P(ExpertsBitsTest, InnerRowsComputedAgainEqualThoseKept) {
  const auto p = problem();
  expect_same(p, run_experts(p, {.inner_rows = InnerRows::to_be_computed}), run_experts(p));
}

// A copy of a matrix whose rows lie further apart, between NaNs.
TensorView spread(const ConstTensorView& matrix, std::int64_t stride, std::int64_t offset) {
  Tensor wide({matrix.rows(), stride}, matrix.dtype());
  testing::poison(wide);
  const TensorView view(wide.data() + offset * size_of(matrix.dtype()), matrix.dtype(),
                        matrix.shape(), stride, wide.view().owner());
  for (std::int64_t r = 0; r < matrix.rows(); ++r) {
    std::memcpy(view.row(r), matrix.row(r), static_cast<std::size_t>(matrix.row_bytes()));
  }
  return view;
}

TEST_P(ExpertsBitsTest, DoNotDependOnStridesOfWeights) {
  const auto p = problem();
  const auto expected = run_experts(p);
  auto strided = problem();
  for (auto& expert : strided.weights) {
    expert.gate = spread(expert.gate, 80, 0);  // as of gates and ups that take turns
    expert.up = spread(expert.up, 80, 40);
    expert.down = spread(expert.down, 29, 3);
  }
  expect_same(p, run_experts(strided), expected);
}

TEST_P(ExpertsBitsTest, GradientsMayBeStrided) {
  const auto p = problem();
  const auto expected = run_experts(p);
  std::vector<ExpertGradients> gradients;
  for (const auto& expert : p.weights) {
    auto g = gradients_for(expert);
    g.gate = spread(g.gate, 80, 0);
    g.up = spread(g.up, 80, 40);
    g.down = spread(g.down, 29, 3);
    gradients.push_back(g);
  }
  Tensor rows = p.rows.clone();
  Tensor inner = expected.inner.clone();
  Tensor d_rows = p.rows.clone();
  Experts(p.options).backward(
      p.weights, p.groups(),
      {.rows = rows, .row_weights = p.row_weights, .inner = inner, .d_out = p.d_out},
      {.d_rows = d_rows, .gradients = gradients});
  for (std::size_t e = 0; e < gradients.size(); ++e) {
    expect_same_bits(gradients[e], expected.gradients[e]);
  }
  EXPECT_TRUE(same_bits(without_pads(p, d_rows), without_pads(p, expected.d_rows)));
}

TEST_P(ExpertsBitsTest, PackedWeightsEqualSeparateOnes) {
  const auto p = problem();
  auto packed = problem();
  const auto& o = p.options;
  const auto count = static_cast<std::int64_t>(p.weights.size());
  Tensor gate_up({count, 2 * o.intermediate, o.hidden}, o.dtype);
  Tensor down({count, o.hidden, o.intermediate}, o.dtype);
  Tensor gate_up_bias({count, 2 * o.intermediate}, o.dtype);
  Tensor down_bias({count, o.hidden}, o.dtype);
  const auto append = [](std::byte*& to, const ConstTensorView& view) {
    std::memcpy(to, view.data(), static_cast<std::size_t>(view.bytes()));
    to += view.bytes();
  };
  std::byte* ends[]{gate_up.data(), down.data(), gate_up_bias.data(), down_bias.data()};
  for (const auto& expert : p.weights) {
    append(ends[0], expert.gate);
    append(ends[0], expert.up);
    append(ends[1], expert.down);
    append(ends[2], expert.gate_bias);
    append(ends[2], expert.up_bias);
    append(ends[3], expert.down_bias);
  }
  packed.weights = unpack(PackedExperts{gate_up, down, gate_up_bias, down_bias});
  expect_same(p, run_experts(packed), run_experts(p));
}

INSTANTIATE_TEST_SUITE_P(Options, ExpertsBitsTest,
                         ::testing::Values(Case{Dtype::f32, WeightStage::output},
                                           Case{Dtype::f32, WeightStage::input},
                                           Case{Dtype::bf16, WeightStage::activation},
                                           Case{Dtype::bf16, WeightStage::input}));

}  // namespace
}  // namespace switchyard::experts_bits_test
