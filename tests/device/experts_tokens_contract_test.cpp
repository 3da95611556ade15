// SPDX-License-Identifier: Apache-2.0
// Experts that read their rows from tokens give the bits of experts that are given the rows.
#include <gtest/gtest.h>

#include "device/device_backend.h"
#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/device_experts.h"
#include "support/device/devices.h"
#include "support/device/experts_problem.h"
#include "support/device/token_reading_device.h"

namespace switchyard::experts_tokens_contract_test {
namespace {

using testing::ActivationForm;
using testing::expect_same_bits;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::ExpertsWay;
using testing::kGroups;
using testing::options_of;
using testing::same_bits;
using testing::Storage;
using testing::TokensProblem;

class ExpertsTokensContract : public testing::OnDevices {
 protected:
  void SetUp() override {
    OnDevices::SetUp();
    if (device.memory() == Memory::host) device = testing::token_reading_device();
  }

  // Scatters values of rows to a tensor [T, K] of their assignments.
  static Tensor by_assignment(const TokensProblem& tokens, const ExpertsProblem& problem,
                              const Tensor& of_rows) {
    Tensor result(tokens.weights.shape(), Dtype::f32);
    testing::poison(result);
    for (std::size_t e = 0; e < problem.weights.size(); ++e) {
      const auto first = static_cast<std::size_t>(problem.row_offsets.span<std::int32_t>()[e]);
      const auto count = static_cast<std::size_t>(problem.group_rows.span<std::int32_t>()[e]);
      for (std::size_t r = first; r < first + count; ++r) {
        const auto assignment = tokens.row_sources.span<std::int32_t>()[r];
        result.span<float>()[static_cast<std::size_t>(assignment)] = of_rows.span<float>()[r];
      }
    }
    return result;
  }

  // False where this device makes rows of such experts.
  bool expect_same(ExpertsProblem problem, std::int64_t top_k, ExpertsWay way = {}) const {
    if (!backend_of(device).reads_tokens(problem.options)) return false;
    const auto num_tokens = problem.num_rows() / top_k + 5;
    const TokensProblem tokens(problem, num_tokens, top_k);
    const ExpertsResults expected = run_experts_on(device, problem, way);
    way.tokens = &tokens;
    const ExpertsResults actual = run_experts_on(device, problem, way);
    EXPECT_TRUE(same_bits(actual.out, expected.out));
    EXPECT_TRUE(same_bits(actual.inner, expected.inner));
    EXPECT_TRUE(same_bits(actual.d_rows, expected.d_rows));
    if (way.row_weights) {
      EXPECT_TRUE(
          same_bits(actual.d_row_weights, by_assignment(tokens, problem, expected.d_row_weights)));
    }
    for (std::size_t e = 0; e < expected.gradients.size(); ++e) {
      expect_same_bits(actual.gradients[e], expected.gradients[e]);
    }
    return true;
  }
};
SWITCHYARD_ON_DEVICES(ExpertsTokensContract);

constexpr const char* kNoTokens = "experts of this device and these kernels do not read tokens";

TEST_P(ExpertsTokensContract, EqualRowsAtAnySizeStageAndAlignment) {
  struct Sizes {
    std::int64_t hidden, intermediate;
  };
  for (const auto [hidden, intermediate] : {Sizes{64, 64}, Sizes{264, 136}, Sizes{192, 320}}) {
    for (const auto stage : {WeightStage::output, WeightStage::activation}) {
      for (const std::int64_t alignment : {1, 8, 128}) {
        SCOPED_TRACE(::testing::Message() << hidden << "x" << intermediate << ", alignment "
                                          << alignment << ", " << name_of(stage));
        const auto options =
            options_of(hidden, intermediate, Dtype::bf16, Activation::swiglu, stage);
        if (!expect_same(ExpertsProblem(options, Biases::none, kGroups, alignment), 3)) {
          GTEST_SKIP() << kNoTokens;
        }
      }
    }
  }
}

TEST_P(ExpertsTokensContract, EqualRowsInEveryWayToRun) {
  for (const ActivationForm& form :
       {ActivationForm{Activation::swiglu}, ActivationForm{Activation::clamped_swiglu},
        ActivationForm{Activation::clamped_swiglu, 0.6F, -0.25F}}) {
    const auto options =
        form.in(options_of(136, 72, Dtype::bf16, form.activation, WeightStage::activation));
    for (const ExpertsWay& way :
         {ExpertsWay{.storage = Storage::apart}, ExpertsWay{.storage = Storage::askew},
          ExpertsWay{.interleaved = true}, ExpertsWay{.inner_rows = InnerRows::to_be_computed},
          ExpertsWay{.row_weights = false}}) {
      if (!expect_same(ExpertsProblem(options, Biases::none, kGroups, 1), 8, way)) {
        GTEST_SKIP() << kNoTokens;
      }
    }
  }
}

TEST_P(ExpertsTokensContract, EqualRowsWithFewRowsAndNone) {
  const auto options = options_of(64, 128, Dtype::bf16);
  for (const std::vector<std::int32_t>& groups :
       {std::vector<std::int32_t>{0, 0, 0}, {1}, {0, 1, 0, 2}}) {
    if (!expect_same(ExpertsProblem(options, Biases::none, groups, 1), 2)) {
      GTEST_SKIP() << kNoTokens;
    }
  }
}

}  // namespace
}  // namespace switchyard::experts_tokens_contract_test
