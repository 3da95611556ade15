// SPDX-License-Identifier: Apache-2.0
// The bits of experts on every device, and the memory they leave alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/device_experts.h"
#include "support/device/devices.h"
#include "support/device/experts_problem.h"

namespace switchyard::experts_bits_contract_test {
namespace {

using testing::copy_on;
using testing::expect_same_bits;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::ExpertsWay;
using testing::kGroups;
using testing::kStages;
using testing::options_of;
using testing::same_bits;
using testing::Storage;

class ExpertsBitsContract : public testing::OnDevices {
 protected:
  ExpertsResults run(const ExpertsProblem& problem, const ExpertsWay& way = {}) const {
    return run_experts_on(device, problem, way);
  }
};
SWITCHYARD_ON_DEVICES(ExpertsBitsContract);

TEST_P(ExpertsBitsContract, WithoutRowWeightsTheyAreOne) {
  for (const auto stage : kStages) {
    for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
      ExpertsProblem problem(options_of(48, 40, dtype, Activation::swiglu, stage), Biases::all,
                             kGroups, 1);
      const auto without = run(problem, {.row_weights = false});
      for (float& weight : problem.row_weights.span<float>()) weight = 1.0F;
      const auto ones = run(problem);
      EXPECT_TRUE(same_bits(without.out, ones.out));
      EXPECT_TRUE(same_bits(without.d_rows, ones.d_rows));
      for (std::size_t e = 0; e < ones.gradients.size(); ++e) {
        expect_same_bits(without.gradients[e], ones.gradients[e]);
      }
    }
  }
}

TEST_P(ExpertsBitsContract, OutMayBeTheMemoryOfRowsAndInnerNowhere) {
  for (const auto stage : kStages) {
    for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
      const ExpertsProblem problem(options_of(48, 40, dtype, Activation::swiglu, stage),
                                   Biases::all, kGroups, 16);
      std::vector<ExpertWeights> weights;
      for (const auto& expert : problem.weights) {
        weights.push_back(testing::expert_on(device, expert, Storage::together));
      }
      const TensorView rows = copy_on(device, problem.rows);
      const ExpertsInput in{.rows = rows, .row_weights = copy_on(device, problem.row_weights)};
      backend_of(device).experts_forward({problem.options,
                                          weights,
                                          copy_on(device, problem.row_offsets),
                                          copy_on(device, problem.group_rows),
                                          in,
                                          {.out = rows}});
      const Tensor out = get(rows);
      EXPECT_TRUE(same_bits(without_pads(problem, out), without_pads(problem, run(problem).out)));
      EXPECT_TRUE(has_poisoned_pads(problem, out));
    }
  }
}

TEST_P(ExpertsBitsContract, AnExpertsBitsDependOnItsRowsAlone) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto stage : kStages) {
      const auto options = options_of(48, 40, dtype, Activation::swiglu, stage);
      const ExpertsProblem together(options, Biases::all, {5, 0, 700, 1, 200}, 16);
      const ExpertsProblem alone(options, Biases::all, {0, 0, 700, 0, 0}, 1);
      const auto expected = run(together);
      const auto actual = run(alone);
      const auto group = [](const ExpertsProblem& problem, const Tensor& rows) {
        const auto first = problem.row_offsets.span<std::int32_t>()[2];
        return rows.view().slice(first, first + 700);
      };
      const auto check = [&](const Tensor& a, const Tensor& b, const char* name) {
        EXPECT_TRUE(same_bits(group(alone, a), group(together, b))) << name;
        EXPECT_TRUE(has_poisoned_pads(together, b)) << name;
      };
      check(actual.out, expected.out, "out");
      check(actual.inner, expected.inner, "inner");
      check(actual.d_rows, expected.d_rows, "d_rows");
      check(actual.d_row_weights, expected.d_row_weights, "d_row_weights");
      expect_same_bits(actual.gradients[2], expected.gradients[2]);
    }
  }
}

TEST_P(ExpertsBitsContract, RunsAreEqualToTheBit) {
  const ExpertsProblem problem(options_of(136, 72, Dtype::bf16), Biases::all, {300, 0, 1, 900}, 1);
  const auto first = run(problem);
  const auto second = run(problem);
  EXPECT_TRUE(same_bits(first.out, second.out));
  EXPECT_TRUE(same_bits(first.d_rows, second.d_rows));
  EXPECT_TRUE(same_bits(first.d_row_weights, second.d_row_weights));
  for (std::size_t e = 0; e < first.gradients.size(); ++e) {
    expect_same_bits(first.gradients[e], second.gradients[e]);
  }
}

void expect_finite(const ConstTensorView& view, const char* name) {
  const auto values = testing::doubles_of(view).values;
  EXPECT_TRUE(std::ranges::all_of(values, [](double v) { return std::isfinite(v); })) << name;
}

// Squares of such inner values are no floats.
TEST_P(ExpertsBitsContract, HugeInnerValuesGiveNoNan) {
  for (const auto activation :
       {Activation::clamped_swiglu, Activation::limited_swiglu, Activation::gelu,
        Activation::gelu_tanh, Activation::relu, Activation::silu}) {
    SCOPED_TRACE(name_of(activation));
    ExpertsProblem problem(options_of(16, 24, Dtype::f32, activation), Biases::none, {3, 4}, 1);
    for (float& value : problem.rows.span<float>()) value *= 1e24F;
    const auto results = run(problem);
    expect_finite(without_pads(problem, results.out), "out");
    expect_finite(without_pads(problem, results.d_rows), "d_rows");
    expect_finite(without_pads(problem, results.d_row_weights), "d_row_weights");
    for (const auto& expert : results.gradients) {
      for (const auto& [name, tensor] : testing::named_tensors(expert)) {
        if (tensor.data() != nullptr) expect_finite(tensor, name);
      }
    }
  }
}

TEST_P(ExpertsBitsContract, WithoutExpertsNothingHappens) {
  const ExpertsProblem problem(options_of(8, 4, Dtype::bf16), Biases::none, {}, 1);
  const auto results = run(problem);
  EXPECT_TRUE(has_poisoned_pads(problem, results.out));
  EXPECT_TRUE(has_poisoned_pads(problem, results.d_rows));
}

TEST_P(ExpertsBitsContract, WithoutRowsGradientsAreZeros) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    ExpertsProblem problem(options_of(24, 16, dtype), Biases::all, {0, 0}, 1);
    for (const std::int64_t capacity : {3, 0}) {
      problem.rows = Tensor({capacity, 24}, dtype);
      problem.d_out = Tensor({capacity, 24}, dtype);
      problem.row_weights = Tensor({capacity}, Dtype::f32);
      for (Tensor* tensor : {&problem.rows, &problem.d_out, &problem.row_weights}) {
        testing::poison(*tensor);
      }
      const auto results = run(problem);
      EXPECT_TRUE(has_poisoned_pads(problem, results.out));
      for (const auto& expert : results.gradients) {
        for (const auto& [name, tensor] : testing::named_tensors(expert)) {
          EXPECT_TRUE(same_bits(tensor, Tensor::zeros(tensor.shape(), dtype))) << name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::experts_bits_contract_test
