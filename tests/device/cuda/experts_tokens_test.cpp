// SPDX-License-Identifier: Apache-2.0
// Experts on a GPU that read their rows from tokens: to the bit as from the rows of a dispatch.
#include <gtest/gtest.h>

#include <string>

#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/device_experts.h"
#include "support/device/devices.h"
#include "support/device/experts_problem.h"
#include "support/device/token_problem.h"
#include "support/random.h"
#include "switchyard/experts.h"

namespace switchyard::testing::experts_tokens_test {
namespace {

class CudaExpertsTokens : public ::testing::Test {
 protected:
  void SetUp() override {
    static const std::string reason = reason_for_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    device = Device::cuda(cuda_options());
    if (!Experts(options_of(64, 64, Dtype::bf16), device).reads_tokens()) {
      GTEST_SKIP() << "experts do not read tokens here: there are no kernels of Hopper";
    }
  }

  Device device;
};

void expect_bits_of_rows(const TokenProblem& problem, TokenWay way) {
  ASSERT_TRUE(problem.experts().reads_tokens());
  way.from_tokens = false;
  const auto expected = problem.run(way);
  way.from_tokens = true;
  const auto actual = problem.run(way);
  EXPECT_TRUE(same_bits(actual.out, expected.out)) << "out";
  EXPECT_TRUE(same_bits(actual.inner, expected.inner)) << "inner";
  EXPECT_TRUE(same_bits(actual.d_rows, expected.d_rows)) << "d_rows";
  EXPECT_TRUE(same_bits(actual.d_row_weights, expected.d_row_weights)) << "d_row_weights";
  for (std::size_t e = 0; e < expected.gradients.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    expect_same_bits(actual.gradients[e], expected.gradients[e]);
  }
}

constexpr WeightStage kStagesOfTokens[]{WeightStage::output, WeightStage::activation};

TEST_F(CudaExpertsTokens, BitsAreThoseOfRows) {
  struct Size {
    std::int64_t hidden, intermediate, top_k;
  };
  for (const auto [hidden, intermediate, top_k] :
       {Size{64, 64, 1}, Size{136, 200, 2}, Size{320, 264, 6}}) {
    for (const ActivationForm& form :
         {ActivationForm{Activation::swiglu}, ActivationForm{Activation::clamped_swiglu},
          ActivationForm{Activation::clamped_swiglu, 0.6F, -0.25F}}) {
      for (const auto stage : kStagesOfTokens) {
        TokenSetup setup{
            form.in(options_of(hidden, intermediate, Dtype::bf16, form.activation, stage))};
        setup.options.clamp_limit = 0.4F;
        setup.picks.top_k = top_k;
        setup.alignment = top_k == 2 ? 16 : 1;
        setup.capacity = 2400;
        const TokenProblem problem(device, setup);
        SCOPED_TRACE(::testing::Message()
                     << "H " << hidden << ", " << name_of(form) << ", " << name_of(stage));
        for (const auto inner_rows : {InnerRows::kept, InnerRows::to_be_computed}) {
          for (const bool has_weights : {false, true}) {
            expect_bits_of_rows(problem, {.inner_rows = inner_rows, .has_weights = has_weights});
          }
        }
      }
    }
  }
}

// gpt-oss has such experts. Askew biases are not aligned to pairs of elements.
TEST_F(CudaExpertsTokens, BiasesHaveTheBitsOfRows) {
  for (const auto stage : kStagesOfTokens) {
    for (const auto storage : {Storage::together, Storage::askew}) {
      TokenSetup setup{
          .options = options_of(136, 200, Dtype::bf16, Activation::clamped_swiglu, stage),
          .storage = storage,
          .biases = Biases::all};
      const TokenProblem problem(device, setup);
      SCOPED_TRACE(::testing::Message() << name_of(stage));
      for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
        for (const bool has_weights : {false, true}) {
          expect_bits_of_rows(problem, {.has_weights = has_weights, .mode = mode});
        }
      }
    }
  }
}

TEST_F(CudaExpertsTokens, HiddenThatIsMadeAgainHasTheSameBits) {
  for (const auto stage : kStagesOfTokens) {
    const TokenProblem problem(
        device, {.options = options_of(136, 72, Dtype::bf16, Activation::swiglu, stage)});
    const auto kept = problem.run({.from_tokens = true});
    const auto again = problem.run({.from_tokens = true, .inner_rows = InnerRows::to_be_computed});
    EXPECT_TRUE(same_bits(again.out, kept.out));
    EXPECT_TRUE(same_bits(again.d_rows, kept.d_rows));
    EXPECT_TRUE(same_bits(again.d_row_weights, kept.d_row_weights));
    for (std::size_t e = 0; e < kept.gradients.size(); ++e) {
      expect_same_bits(again.gradients[e], kept.gradients[e]);
    }
  }
}

// Those of gate and up in one product, and where their dtypes differ in two.
TEST_F(CudaExpertsTokens, GradientsOfEitherDtypeAddedToOrNot) {
  const TokenProblem problem(device, {.options = options_of(136, 264, Dtype::bf16)});
  for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
    for (const auto up_and_down : {Dtype::bf16, Dtype::f32}) {
      for (const auto gate : {Dtype::bf16, Dtype::f32}) {
        SCOPED_TRACE(::testing::Message() << name_of(up_and_down) << " and " << name_of(gate));
        expect_bits_of_rows(problem, {.mode = mode, .up_and_down = up_and_down, .gate = gate});
      }
    }
  }
}

TEST_F(CudaExpertsTokens, TensorsMayLieApart) {
  for (const auto storage : {Storage::apart, Storage::askew}) {
    for (const auto stage : kStagesOfTokens) {
      const TokenProblem problem(
          device, {.options = options_of(136, 72, Dtype::bf16, Activation::swiglu, stage),
                   .alignment = 16,
                   .storage = storage});
      SCOPED_TRACE(storage == Storage::apart ? "apart" : "askew");
      expect_bits_of_rows(problem, {});
      expect_bits_of_rows(problem, {.inner_rows = InnerRows::to_be_computed});
    }
  }
}

// Weight gradients of such experts read rows that were gathered: of gate and up, or all.
TEST_F(CudaExpertsTokens, WideExpertsGatherRows) {
  for (const std::int64_t intermediate : {1288, 2568}) {
    for (const auto storage : {Storage::together, Storage::apart, Storage::askew}) {
      TokenSetup setup{.options = options_of(72, intermediate, Dtype::bf16),
                       .picks = {.num_tokens = 150, .top_k = 3, .num_experts = 5, .skew = 1.0},
                       .alignment = 16,
                       .storage = storage};
      const TokenProblem problem(device, setup);
      SCOPED_TRACE(::testing::Message() << "I " << intermediate);
      expect_bits_of_rows(problem, {});
      expect_bits_of_rows(problem, {.inner_rows = InnerRows::to_be_computed});
    }
  }
}

// The weights of assignments without a row get no gradient, and nothing is read for them.
TEST_F(CudaExpertsTokens, DroppedAssignmentsAndEmptyExperts) {
  const TokenSetup setup{
      .options = options_of(128, 72, Dtype::bf16),
      .picks = {.num_tokens = 400, .top_k = 2, .num_experts = 40, .skew = 1.0, .none = 0.3},
      .alignment = 16,
      .capacity = 320};
  const TokenProblem problem(device, setup);
  ASSERT_GT(problem.num_dropped(), 0);
  expect_bits_of_rows(problem, {});
  expect_bits_of_rows(problem, {.inner_rows = InnerRows::to_be_computed});
}

TEST_F(CudaExpertsTokens, WithoutTokensGradientsAreZerosOrAsTheyWere) {
  TokenSetup setup{.options = options_of(64, 72, Dtype::bf16)};
  setup.picks.num_tokens = 0;
  for (const std::int64_t capacity : {0, 16}) {
    setup.capacity = capacity;
    const TokenProblem problem(device, setup);
    for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
      expect_bits_of_rows(problem, {.mode = mode});
    }
    const auto results = problem.run({.from_tokens = true});
    for (const auto& expert : results.gradients) {
      EXPECT_TRUE(same_bits(expert.gate, Tensor::zeros({72, 64}, Dtype::bf16)));
      EXPECT_TRUE(same_bits(expert.down, Tensor::zeros({64, 72}, Dtype::bf16)));
    }
  }
}

TEST_F(CudaExpertsTokens, OthersDoNotReadTokens) {
  const auto reads = [&](const ExpertsOptions& options) {
    return Experts(options, device).reads_tokens();
  };
  const auto bf16 = Dtype::bf16;
  EXPECT_TRUE(reads(options_of(64, 64, bf16)));
  EXPECT_FALSE(reads(options_of(64, 64, Dtype::f32)));
  EXPECT_FALSE(reads(options_of(48, 40, bf16)));
  for (const ActivationForm& form : kActivationForms) {
    const bool is_fused =
        form.activation == Activation::swiglu || form.activation == Activation::clamped_swiglu;
    EXPECT_EQ(reads(form.in(options_of(64, 64, bf16))), is_fused) << name_of(form);
  }
  EXPECT_FALSE(reads(options_of(64, 64, bf16, Activation::swiglu, WeightStage::input)));
}

}  // namespace
}  // namespace switchyard::testing::experts_tokens_test
