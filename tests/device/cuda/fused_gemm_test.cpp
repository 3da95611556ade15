// SPDX-License-Identifier: Apache-2.0
// Projections and their activation in one kernel, to the bit as in steps.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "device/cuda/backend.h"
#include "device/cuda/grouped_gemm.h"
#include "device/cuda/hopper/kernel_args.h"
#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/fused_problem.h"
#include "support/device/fused_runs.h"

namespace switchyard::testing::fused_gemm_test {
namespace {

constexpr RowWeights kWeights[]{RowWeights::none, RowWeights::of_rows, RowWeights::of_assignments};

using Pass = FusedResults (FusedRuns::*)(FusedWay) const;
struct Direction {
  Pass fused;
  Pass in_steps;
};
constexpr Direction kForward{&FusedRuns::activate, &FusedRuns::activate_in_steps};
constexpr Direction kBackward{&FusedRuns::activate_backward,
                              &FusedRuns::activate_backward_in_steps};

bool is_given(const Tensor& results) { return results.rows() > 0; }

// The gradients of weights are sums in another order than the steps'.
void expect_steps(const FusedProblem& problem, const FusedResults& actual,
                  const FusedResults& steps) {
  EXPECT_TRUE(same_bits(actual.activated, steps.activated)) << "activated";
  if (is_given(actual.inner)) {
    EXPECT_TRUE(same_bits(actual.inner, steps.inner)) << "inner";
  }
  if (is_given(actual.d_weights)) {
    EXPECT_TRUE(near(problem.grouped(actual.d_weights), problem.grouped(steps.d_weights), 1e-5))
        << "d_weights";
  }
}

// In every way, of matrices that are evenly spaced and of others.
void expect_steps(const Device& device, const FusedSetup& setup, const Direction& direction) {
  const FusedProblem problem(setup);
  const FusedRuns packed(device, problem);
  const FusedRuns scattered(device, problem, {.scattered = true});
  // Neither the weights nor where rows are read from is in the weights' gradients.
  const Tensor d_weights = (packed.*direction.fused)({}).d_weights;
  for (const auto weights : kWeights) {
    const auto steps = (packed.*direction.in_steps)({.weights = weights});
    for (const bool from_tokens : {false, true}) {
      FusedWay way{.from_tokens = from_tokens, .weights = weights};
      for (const FusedRuns* runs : {&packed, &scattered}) {
        SCOPED_TRACE(::testing::Message()
                     << setup << ", " << way << (runs == &packed ? "" : ", scattered matrices"));
        const auto actual = (runs->*direction.fused)(way);
        expect_steps(problem, actual, steps);
        EXPECT_TRUE(same_bits(actual.inner, steps.inner));
        EXPECT_TRUE(same_bits(actual.d_weights, d_weights));
      }
      way.keeps_inner = false;
      way.has_d_weights = false;
      SCOPED_TRACE(::testing::Message() << setup << ", " << way);
      expect_steps(problem, (packed.*direction.fused)(way), steps);
    }
  }
}

TEST_F(CudaFusedGemm, ForwardEqualsTheSteps) {
  for (const FusedSetup& setup : setups_of_all_sizes()) expect_steps(device, setup, kForward);
}

TEST_F(CudaFusedGemm, BackwardEqualsTheSteps) {
  for (const FusedSetup& setup : setups_of_all_sizes()) expect_steps(device, setup, kBackward);
}

TEST_F(CudaFusedGemm, ClampedEqualsTheSteps) {
  for (FusedSetup setup : {setups_of_all_sizes()[3], setups_of_all_sizes()[5]}) {
    for (const ActivationForm& form : kActivationForms) {
      if (form.activation != Activation::clamped_swiglu) continue;
      setup.form = form;
      expect_steps(device, setup, kForward);
      expect_steps(device, setup, kBackward);
    }
  }
}

TEST_F(CudaFusedGemm, GroupsOfAllKindsEqualTheSteps) {
  for (const FusedSetup& setup : setups_of_all_groups()) {
    const FusedProblem problem(setup);
    const FusedRuns runs(device, problem);
    for (const Direction& direction : {kForward, kBackward}) {
      FusedWay way{.weights = RowWeights::of_assignments};
      const auto steps = (runs.*direction.in_steps)(way);
      for (const bool from_tokens : {false, true}) {
        way.from_tokens = from_tokens;
        SCOPED_TRACE(::testing::Message() << setup << ", " << way);
        expect_steps(problem, (runs.*direction.fused)(way), steps);
      }
    }
  }
}

TEST_F(CudaFusedGemm, BitsDoNotDependOnOtherGroups) {
  const FusedProblem problem({.intermediate = 264,
                              .hidden = 200,
                              .group_rows = {70, 0, 300, 1, 128, 193},
                              .alignment = 16,
                              .top_k = 3});
  const FusedRuns runs(device, problem);
  for (const Pass pass : {kForward.fused, kBackward.fused}) {
    for (const bool from_tokens : {false, true}) {
      FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
      const auto together = (runs.*pass)(way);
      for (way.group = 0; way.group < problem.num_groups(); ++way.group) {
        SCOPED_TRACE(::testing::Message() << way << ", group " << way.group);
        const auto alone = (runs.*pass)(way);
        const auto expect_same = [&](const Tensor& actual, const Tensor& expected) {
          if (!is_given(expected)) return;
          EXPECT_TRUE(
              same_bits(problem.group(way.group, actual), problem.group(way.group, expected)));
        };
        expect_same(alone.inner, together.inner);
        expect_same(alone.activated, together.activated);
        expect_same(alone.d_weights, together.d_weights);
      }
    }
  }
}

TEST_F(CudaFusedGemm, TicketsChangeNoBitAndAreLeftZero) {
  const FusedProblem problem({.intermediate = 264,
                              .hidden = 200,
                              .group_rows = {70, 0, 300, 1, 128, 193},
                              .alignment = 16});
  const FusedRuns runs(device, problem);
  for (const Pass pass : {kForward.fused, kBackward.fused}) {
    for (const bool from_tokens : {false, true}) {
      FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
      const auto fixed = (runs.*pass)(way);
      way.has_tickets = true;
      SCOPED_TRACE(::testing::Message() << way);
      expect_same_bits((runs.*pass)(way), fixed);
      EXPECT_TRUE(same_bits(runs.tickets(), Tensor::zeros({2}, Dtype::i32)));
    }
  }
}

// Eight elements apart bulk copies still reach them; otherwise they do not.
TEST_F(CudaFusedGemm, BitsDoNotDependOnAlignment) {
  for (const auto& [intermediate, hidden] : {std::pair{72, 136}, std::pair{256, 128}}) {
    const FusedProblem problem({.intermediate = intermediate,
                                .hidden = hidden,
                                .group_rows = {130, 0, 9, 300},
                                .alignment = 16});
    const FusedRuns aligned(device, problem);
    for (const std::int64_t spare : {1, 4, 8}) {
      const FusedRuns apart(device, problem, {.scattered = spare == 4, .spare = spare});
      for (const Pass pass : {kForward.fused, kBackward.fused}) {
        for (const bool from_tokens : {false, true}) {
          for (const bool keeps_inner : {false, true}) {
            const FusedWay way{.from_tokens = from_tokens,
                               .weights = RowWeights::of_assignments,
                               .keeps_inner = keeps_inner};
            SCOPED_TRACE(::testing::Message()
                         << problem.setup << ", " << way << ", spare " << spare);
            expect_same_bits((apart.*pass)(way), (aligned.*pass)(way));
          }
        }
      }
    }
  }
}

TEST_F(CudaFusedGemm, RunsAreEqualToTheBit) {
  const FusedProblem problem(
      {.intermediate = 136, .hidden = 128, .group_rows = random_groups(200, 70), .top_k = 8});
  const FusedRuns runs(device, problem);
  for (const Pass pass : {kForward.fused, kBackward.fused}) {
    for (const bool from_tokens : {false, true}) {
      const FusedWay way{.from_tokens = from_tokens, .weights = RowWeights::of_assignments};
      const auto first = (runs.*pass)(way);
      for (int i = 1; i < 10; ++i) {
        SCOPED_TRACE(::testing::Message() << way << ", run " << i);
        expect_same_bits((runs.*pass)(way), first);
      }
    }
  }
}

// By options and sizes alone.
TEST_F(CudaFusedGemm, RunsLayersWhoseOptionsAndSizesFit) {
  struct Case {
    ExpertsOptions options;
    bool fits;
  };
  const ExpertsOptions usual{.hidden = 64, .intermediate = 72, .dtype = Dtype::bf16};
  std::vector<Case> cases(4, {usual, false});
  cases[0].fits = true;
  cases[1].options.hidden = 68;
  cases[2].options.intermediate = 56;
  cases[3].options.dtype = Dtype::f32;
  for (const ActivationForm& form : kActivationForms) {
    cases.push_back({form.in(usual), form.activation == Activation::swiglu ||
                                         form.activation == Activation::clamped_swiglu});
  }
  auto& context = cuda::context_of(device);
  for (const auto& [options, fits] : cases) {
    SCOPED_TRACE(::testing::Message() << "H " << options.hidden << ", I " << options.intermediate
                                      << ", " << name_of(options.activation));
    const cuda::ActivatedGemm forward{.options = options,
                                      .groups = {},
                                      .a = {},
                                      .b = {{}, 2, options.intermediate, options.hidden},
                                      .inner = {},
                                      .activated = {}};
    const cuda::ActivationGradientGemm backward{.options = options,
                                                .groups = {},
                                                .a = {},
                                                .b = {{}, 1, options.hidden, options.intermediate},
                                                .inner = {},
                                                .activated = {}};
    EXPECT_EQ(cuda::hopper::grouped_gemm(forward, context), fits);
    EXPECT_EQ(cuda::hopper::grouped_gemm(backward, context), fits);
    EXPECT_EQ(cuda::hopper::reads_tokens(options, context), fits);
  }
  ExpertsOptions weighs_input = usual;
  weighs_input.weight_stage = WeightStage::input;
  EXPECT_FALSE(cuda::hopper::reads_tokens(weighs_input, context));
}

// Tokens are found by it; no GPU is needed to see it right.
TEST(HopperDivisor, DividesAllNumbersBelowTwoToThe31) {
  constexpr std::uint32_t kEnd = 1U << 31;
  for (const std::uint32_t by : {1U, 2U, 3U, 5U, 6U, 7U, 8U, 10U, 60U, 64U, 127U, 641U, 65537U}) {
    const cuda::hopper::Divisor divisor(by);
    const auto expect_at = [&](std::uint32_t number) {
      ASSERT_EQ(divisor.divide(number), number / by) << number << " by " << by;
    };
    for (std::uint32_t i = 0; i < 1000; ++i) {
      expect_at(i);
      expect_at(kEnd - 1 - i);
      const std::uint32_t multiple = (kEnd - 1) / by / 1000 * i * by;
      expect_at(multiple);
      if (multiple > 0) expect_at(multiple - 1);
    }
  }
}

}  // namespace
}  // namespace switchyard::testing::fused_gemm_test
