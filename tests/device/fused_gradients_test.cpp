// The gradients that an activation hands on, made where the down projection's input gradient is;
// and the weight gradients, from rows and from tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "device/cuda/grouped_gemm.h"
#include "support/compare.h"
#include "support/fused_problem.h"
#include "support/fused_runs.h"

namespace switchyard::testing {
namespace {

using Side = cuda::WeightGradientGemm::Side;

constexpr RowWeights kWeights[]{RowWeights::none, RowWeights::of_rows, RowWeights::of_assignments};

// The weights' gradients are sums in another order than the steps'.
void expect_steps(const FusedProblem& problem, const FusedResults& actual,
                  const FusedResults& steps) {
  EXPECT_TRUE(same_bits(actual.hidden, steps.hidden)) << "hidden";
  EXPECT_TRUE(same_bits(actual.activated, steps.activated)) << "activated";
  EXPECT_TRUE(near(problem.grouped(actual.d_weights), problem.grouped(steps.d_weights), 1e-5))
      << "d_weights";
}

void expect_steps(const Device& device, const FusedSetup& setup) {
  const FusedProblem problem(setup);
  const FusedRuns packed(device, problem);
  const FusedRuns scattered(device, problem, {.scattered = true});
  // Neither what the weights are nor where rows are read from is in their gradients.
  const auto d_weights = packed.activate_backward({}).d_weights;
  for (const auto weights : kWeights) {
    const auto expected = packed.activate_backward_in_steps({.weights = weights});
    for (const bool from_tokens : {false, true}) {
      for (const FusedRuns* runs : {&packed, &scattered}) {
        const FusedWay way{.from_tokens = from_tokens, .weights = weights};
        SCOPED_TRACE(::testing::Message()
                     << setup << ", " << way << (runs == &packed ? "" : ", scattered matrices"));
        const auto actual = runs->activate_backward(way);
        expect_steps(problem, actual, expected);
        EXPECT_TRUE(same_bits(actual.d_weights, d_weights));
      }
      const FusedWay way{.from_tokens = from_tokens, .weights = weights, .has_d_weights = false};
      SCOPED_TRACE(::testing::Message() << setup << ", " << way);
      const auto without = packed.activate_backward(way);
      EXPECT_TRUE(same_bits(without.hidden, expected.hidden));
      EXPECT_TRUE(same_bits(without.activated, expected.activated));
    }
  }
}

TEST_F(CudaFusedGemm, BackwardEqualsTheSteps) {
  for (const FusedSetup& setup : setups_of_all_sizes()) expect_steps(device, setup);
}

TEST_F(CudaFusedGemm, ClampedBackwardEqualsTheSteps) {
  for (FusedSetup setup : {setups_of_all_sizes()[3], setups_of_all_sizes()[5]}) {
    setup.activation = Activation::clamped_swiglu;
    expect_steps(device, setup);
  }
}

TEST_F(CudaFusedGemm, BackwardOfGroupsOfAllKindsEqualsTheSteps) {
  for (const FusedSetup& setup : setups_of_all_groups()) {
    const FusedProblem problem(setup);
    const FusedRuns runs(device, problem);
    const auto expected = runs.activate_backward_in_steps({.weights = RowWeights::of_assignments});
    for (const bool from_tokens : {false, true}) {
      const FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
      SCOPED_TRACE(::testing::Message() << setup << ", " << way);
      expect_steps(problem, runs.activate_backward(way), expected);
    }
  }
}

TEST_F(CudaFusedGemm, BackwardBitsDoNotDependOnOtherGroups) {
  const FusedProblem problem({.intermediate = 264,
                              .hidden = 136,
                              .group_rows = {70, 0, 300, 1, 128, 193},
                              .alignment = 16,
                              .top_k = 3});
  const FusedRuns runs(device, problem);
  for (const bool from_tokens : {false, true}) {
    FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
    const auto together = runs.activate_backward(way);
    for (way.group = 0; way.group < problem.num_groups(); ++way.group) {
      SCOPED_TRACE(::testing::Message() << way << ", group " << way.group);
      const auto alone = runs.activate_backward(way);
      const auto of_group = [&](const Tensor& rows) { return problem.group(way.group, rows); };
      EXPECT_TRUE(same_bits(of_group(alone.hidden), of_group(together.hidden)));
      EXPECT_TRUE(same_bits(of_group(alone.activated), of_group(together.activated)));
      EXPECT_TRUE(same_bits(of_group(alone.d_weights), of_group(together.d_weights)));
    }
  }
}

TEST_F(CudaFusedGemm, BackwardBitsDoNotDependOnAlignment) {
  for (const auto& [intermediate, hidden] : {std::pair{72, 136}, std::pair{256, 128}}) {
    const FusedProblem problem({.intermediate = intermediate,
                                .hidden = hidden,
                                .group_rows = {130, 0, 9, 300},
                                .alignment = 16});
    const FusedRuns aligned(device, problem);
    for (const std::int64_t spare : {1, 4, 8}) {
      const FusedRuns apart(device, problem, {.scattered = spare == 4, .spare = spare});
      for (const bool from_tokens : {false, true}) {
        const FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
        SCOPED_TRACE(::testing::Message() << problem.setup << ", " << way << ", spare " << spare);
        expect_same_bits(apart.activate_backward(way), aligned.activate_backward(way));
      }
    }
  }
}

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

// Which of the groups comes first depends on all of their lengths.
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
}  // namespace switchyard::testing
