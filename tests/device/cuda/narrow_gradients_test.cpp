// SPDX-License-Identifier: Apache-2.0
// Weight gradients that are narrow along either side, from rows and from tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "device/cuda/grouped_gemm.h"
#include "support/compare.h"
#include "support/device/fused_problem.h"
#include "support/device/fused_runs.h"

namespace switchyard::testing::narrow_gradients_test {
namespace {

using Side = cuda::WeightGradientGemm::Side;

// Parts are the wide side's.
std::vector<GradientWay> narrow_sides() {
  return {{.narrow = Side::a}, {.narrow = Side::b}, {.narrow = Side::b, .parts = 2}};
}

// In either dtype, overwritten and added to.
std::vector<GradientWay> ways_to_store(GradientWay way) {
  std::vector<GradientWay> ways;
  for (const auto dtype : {Dtype::bf16, Dtype::f32}) {
    for (const bool accumulate : {false, true}) {
      way.dtype = dtype;
      way.accumulate = accumulate;
      ways.push_back(way);
    }
  }
  return ways;
}

// expected[part · groups + group], without what was there before.
void expect_sums(const FusedProblem& problem, const GradientWay& way,
                 const std::vector<ConstTensorView>& actual, const std::vector<Doubles>& expected) {
  const Tensor stack = problem.gradients_before(way);
  const auto before = matrices_of(stack, problem.gradient_shape(way));
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto rows = problem.setup.group_rows[i % problem.setup.group_rows.size()];
    SCOPED_TRACE(::testing::Message() << "matrix " << i << " of " << rows << " rows");
    if (rows == 0) {
      const Tensor zero = Tensor::zeros(actual[i].shape(), way.dtype);
      EXPECT_TRUE(same_bits(actual[i], way.accumulate ? before[i] : zero.view()));
      continue;
    }
    Doubles sums = expected[i];
    const Doubles start = doubles_of(before[i]);
    for (std::size_t j = 0; way.accumulate && j < sums.values.size(); ++j) {
      sums.values[j] += start.values[j];
    }
    const double tolerance =
        way.dtype == Dtype::bf16 ? 4e-3 : 1e-6 * std::sqrt(static_cast<double>(rows) + 1.0);
    EXPECT_TRUE(near(actual[i], tensor_of(sums), tolerance));
  }
}

void expect_same_matrices(const std::vector<ConstTensorView>& actual,
                          const std::vector<ConstTensorView>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << "matrix " << i;
  }
}

TEST_F(CudaFusedGemm, WeightGradientsEqualDoublePrecision) {
  for (const auto& [intermediate, hidden] :
       {std::pair{64, 64}, {72, 136}, {264, 72}, {320, 200}, {128, 328}}) {
    const FusedProblem problem({.intermediate = intermediate,
                                .hidden = hidden,
                                .group_rows = {0, 1, 63, 64, 65, 130, 300, 0},
                                .alignment = hidden % 16 == 0 ? 1 : 16,
                                .top_k = hidden % 3 + 1});
    const FusedRuns packed(device, problem);
    const FusedRuns scattered(device, problem, {.scattered = true});
    for (const GradientWay& side : narrow_sides()) {
      std::vector<Doubles> expected;
      for (int i = 0; i < side.parts * problem.num_groups(); ++i) {
        expected.push_back(
            problem.expected_gradient(side, i % problem.num_groups(), i / problem.num_groups()));
      }
      for (GradientWay way : ways_to_store(side)) {
        SCOPED_TRACE(::testing::Message() << problem.setup << ", " << way);
        const auto of_rows = packed.weight_gradients(way);
        expect_sums(problem, way, of_rows, expected);
        expect_same_matrices(scattered.weight_gradients(way), of_rows);
        way.from_tokens = true;
        expect_same_matrices(packed.weight_gradients(way), of_rows);
        expect_same_matrices(scattered.weight_gradients(way), of_rows);
      }
    }
  }
}

// The order of groups depends on the lengths of all of them.
TEST_F(CudaFusedGemm, WeightGradientBitsDoNotDependOnOtherGroups) {
  auto group_rows = random_groups(150, 40);
  for (const std::size_t g : {3, 50, 51, 149}) group_rows[g] += 500;
  const FusedProblem problem(
      {.intermediate = 136, .hidden = 72, .group_rows = group_rows, .top_k = 3});
  const FusedRuns runs(device, problem);
  for (GradientWay way : narrow_sides()) {
    for (const bool from_tokens : {false, true}) {
      way.from_tokens = from_tokens;
      way.group = -1;
      const auto together = runs.weight_gradients(way);
      for (const int group : {0, 1, 3, 50, 77, 149}) {
        way.group = group;
        const auto alone = runs.weight_gradients(way);
        for (int part = 0; part < way.parts; ++part) {
          const auto matrix = static_cast<std::size_t>(part * problem.num_groups() + group);
          EXPECT_TRUE(same_bits(alone[matrix], together[matrix])) << way << ", group " << group;
        }
      }
    }
  }
}

TEST_F(CudaFusedGemm, WeightGradientRunsAreEqualToTheBit) {
  const FusedProblem problem(
      {.intermediate = 136, .hidden = 128, .group_rows = random_groups(200, 70), .top_k = 8});
  const FusedRuns runs(device, problem);
  for (GradientWay way : narrow_sides()) {
    way.from_tokens = true;
    const auto first = runs.weight_gradients(way);
    for (int i = 1; i < 10; ++i) expect_same_matrices(runs.weight_gradients(way), first);
  }
}

TEST_F(CudaFusedGemm, WeightGradientBitsDoNotDependOnAlignment) {
  const FusedProblem problem(
      {.intermediate = 264, .hidden = 136, .group_rows = {130, 0, 9, 300}, .alignment = 16});
  const FusedRuns aligned(device, problem);
  for (const std::int64_t spare : {1, 2, 8}) {
    const FusedRuns apart(device, problem, {.spare = spare});
    for (const GradientWay& side : narrow_sides()) {
      for (GradientWay way : ways_to_store(side)) {
        SCOPED_TRACE(::testing::Message() << way << ", spare " << spare);
        const auto expected = aligned.weight_gradients(way);
        expect_same_matrices(apart.weight_gradients(way), expected);
        way.from_tokens = true;
        expect_same_matrices(apart.weight_gradients(way), expected);
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::testing::narrow_gradients_test
