// SPDX-License-Identifier: Apache-2.0
// Experts on every device: all activations, weight stages and biases, however tensors are stored.
#include <gtest/gtest.h>

#include <cmath>

#include "device/device_backend.h"
#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/device_experts.h"
#include "support/device/devices.h"
#include "support/device/experts_problem.h"

namespace switchyard::experts_contract_test {
namespace {

using testing::ActivationForm;
using testing::doubles_of;
using testing::expect_near;
using testing::expect_same_bits;
using testing::ExpertsProblem;
using testing::ExpertsResults;
using testing::ExpertsWay;
using testing::kActivationForms;
using testing::kGroups;
using testing::kStages;
using testing::near;
using testing::options_of;
using testing::same_bits;
using testing::Storage;
using testing::tensor_of;
using testing::tolerance_of;
using testing::widened;

// Returns the CPU's results in f32 for the same numbers, to compare with.
ExpertsResults results_in_f32(const ExpertsProblem& problem) {
  auto options = problem.options;
  options.dtype = Dtype::f32;
  const auto counts = problem.group_rows.span<std::int32_t>();
  ExpertsProblem wide(options, Biases::none, {counts.begin(), counts.end()}, problem.alignment);
  wide.rows = widened(problem.rows);
  wide.d_out = widened(problem.d_out);
  wide.row_weights = problem.row_weights.clone();
  for (std::size_t e = 0; e < wide.weights.size(); ++e) {
    wide.weights[e] = widened(problem.weights[e]);
  }
  return run_experts(wide);
}

class ExpertsContract : public testing::OnDevices {
 protected:
  bool on_cpu() const { return device.memory() == Memory::host; }
  // On a CPU f32 would be compared with itself.
  std::vector<Dtype> dtypes_to_compare() const {
    if (on_cpu()) return {Dtype::bf16};
    return {Dtype::f32, Dtype::bf16};
  }

  ExpertsResults run(const ExpertsProblem& problem, const ExpertsWay& way = {}) const {
    return run_experts_on(device, problem, way);
  }
  void expect_results(const ExpertsProblem& problem, const ExpertsResults& actual,
                      const ExpertsResults& expected) const;
};
SWITCHYARD_ON_DEVICES(ExpertsContract);

void ExpertsContract::expect_results(const ExpertsProblem& problem, const ExpertsResults& actual,
                                     const ExpertsResults& expected) const {
  const double tolerance = tolerance_of(problem.options);
  const auto check = [&](const Tensor& rows, const Tensor& expected_rows, const char* name) {
    EXPECT_TRUE(has_poisoned_pads(problem, rows)) << name;
    EXPECT_TRUE(near(without_pads(problem, rows), without_pads(problem, expected_rows), tolerance))
        << name;
  };
  check(actual.out, expected.out, "out");
  check(actual.inner, expected.inner, "inner");
  check(actual.d_rows, expected.d_rows, "d_rows");
  check(actual.d_row_weights, expected.d_row_weights, "d_row_weights");
  for (std::size_t e = 0; e < actual.gradients.size(); ++e) {
    SCOPED_TRACE("expert " + std::to_string(e));
    const ExpertWeights gradients = testing::map_expert(
        expected.gradients[e], [](const TensorView& view) -> ConstTensorView { return view; });
    expect_near(actual.gradients[e], doubles_of(gradients), tolerance);
  }
}

std::string words(const ExpertsOptions& options, Biases biases) {
  const ActivationForm form{options.activation, options.gate_alpha, options.up_offset};
  return name_of(form) + " " + std::string(name_of(options.dtype)) + " " +
         std::string(name_of(options.weight_stage)) + (biases == Biases::all ? " with biases" : "");
}

// Against derivatives taken numerically, in double.
TEST_P(ExpertsContract, SmallGroupsEqualTheReference) {
  for (const auto& form : kActivationForms) {
    for (const auto stage : kStages) {
      for (const auto biases : {Biases::none, Biases::all}) {
        const bool odd = stage == WeightStage::activation;  // lines that are not whole
        const auto options =
            form.in(options_of(odd ? 9 : 8, odd ? 7 : 12, Dtype::f32, form.activation, stage));
        SCOPED_TRACE(words(options, biases));
        const ExpertsProblem problem(options, biases, {3, 0, 1, 5}, odd ? 1 : 4);
        const auto results = run(problem);
        const auto offsets = problem.row_offsets.span<std::int32_t>();
        const auto counts = problem.group_rows.span<std::int32_t>();
        for (std::size_t e = 0; e < problem.weights.size(); ++e) {
          const auto group = [&](const Tensor& rows) {
            return rows.view().slice(offsets[e], offsets[e] + counts[e]);
          };
          const auto expected = reference_gradients(problem, e);
          EXPECT_TRUE(near(group(results.out), reference_out(problem, e), 1e-5));
          EXPECT_TRUE(near(group(results.d_rows), tensor_of(expected.d_rows), 1e-4));
          EXPECT_TRUE(near(group(results.d_row_weights), tensor_of(expected.d_row_weights), 1e-4));
          expect_near(results.gradients[e], expected.weights, 1e-4);
        }
      }
    }
  }
}

bool has_kink(Activation activation) {
  return activation == Activation::relu || activation == Activation::reglu;
}
// Sets weights to ±0.5, so that rounding w·x moves no value across relu's kink.
void weigh_exactly(ExpertsProblem& problem) {
  for (float& weight : problem.row_weights.span<float>()) {
    if (!std::isnan(weight)) weight = std::copysign(0.5F, weight);
  }
}

TEST_P(ExpertsContract, AllFormsAreNearF32) {
  for (const auto dtype : dtypes_to_compare()) {
    for (const auto& form : kActivationForms) {
      for (const auto stage : kStages) {
        for (const auto biases : {Biases::none, Biases::all}) {
          const auto options = form.in(options_of(48, 40, dtype, form.activation, stage));
          SCOPED_TRACE(words(options, biases));
          const bool padded = biases == Biases::all;
          ExpertsProblem problem(options, biases, kGroups, padded ? 16 : 1);
          if (has_kink(form.activation)) weigh_exactly(problem);
          const auto expected = results_in_f32(problem);
          const auto kept = run(problem);
          expect_results(problem, kept, expected);
          const auto again = run(problem, {.inner_rows = InnerRows::to_be_computed});
          EXPECT_TRUE(same_bits(again.d_rows, kept.d_rows));
          EXPECT_TRUE(same_bits(again.d_row_weights, kept.d_row_weights));
          for (std::size_t e = 0; e < kept.gradients.size(); ++e) {
            expect_same_bits(again.gradients[e], kept.gradients[e]);
          }
        }
      }
    }
  }
}

TEST_P(ExpertsContract, FrozenExpertsGiveTheirRowsTheSameGradients) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto stage : kStages) {
      const ExpertsProblem problem(options_of(48, 40, dtype, Activation::swiglu, stage),
                                   Biases::none, kGroups, 1);
      const auto expected = run(problem);
      const auto frozen = run(problem, {.frozen = true});
      EXPECT_TRUE(same_bits(frozen.d_rows, expected.d_rows));
      EXPECT_TRUE(same_bits(frozen.d_row_weights, expected.d_row_weights));
    }
  }
}

// A row is a gate and an up, and none of these numbers is rounded. Silu is 32 at 32, to the bit.
ExpertsProblem problem_around_a_limit(ExpertsOptions options) {
  constexpr float kGates[]{-8.0F, 1.0F, 31.0F, 32.0F, 33.0F};
  constexpr float kUps[]{-33.0F, -32.0F, 2.0F, 32.0F, 33.0F};
  options.hidden = 2;
  options.intermediate = 1;
  options.clamp_limit = 32.0F;
  const auto tensor = [&](const Shape& shape, const std::vector<float>& values) {
    if (options.dtype == Dtype::f32) return Tensor::from<float>(shape, values);
    std::vector<Bfloat16> narrow;
    for (const float value : values) narrow.push_back(to_bfloat16(value));
    return Tensor::from<Bfloat16>(shape, narrow);
  };
  std::vector<float> rows;
  for (const float gate : kGates) {
    for (const float up : kUps) rows.insert(rows.end(), {gate, up});
  }
  ExpertsProblem problem(options, Biases::none, {25});
  problem.rows = tensor({25, 2}, rows);
  problem.weights[0] = {.gate = tensor({1, 2}, {1.0F, 0.0F}),
                        .up = tensor({1, 2}, {0.0F, 1.0F}),
                        .down = tensor({2, 1}, {1.0F, 0.0F})};
  return problem;
}

TEST_P(ExpertsContract, ClampsAroundTheLimitAsF32OnACpu) {
  for (const auto dtype : dtypes_to_compare()) {
    for (const auto& form : kActivationForms) {
      if (!has_gate(form.activation)) continue;
      const auto problem = problem_around_a_limit(form.in(ExpertsOptions{.dtype = dtype}));
      SCOPED_TRACE(words(problem.options, Biases::none));
      expect_results(problem, run(problem), results_in_f32(problem));
    }
  }
}

// More than one warp's, and no multiple of anything.
TEST_P(ExpertsContract, LongAndOddRowsAreNearF32) {
  struct Size {
    std::int64_t hidden, intermediate;
  };
  for (const auto [hidden, inner] : {Size{24, 2056}, Size{1100, 37}, Size{2056, 16}}) {
    for (const auto dtype : dtypes_to_compare()) {
      for (const auto stage : kStages) {
        const auto options = options_of(hidden, inner, dtype, Activation::swiglu, stage);
        SCOPED_TRACE(words(options, Biases::all) + " " + std::to_string(hidden));
        const ExpertsProblem problem(options, Biases::all, {3, 0, 9}, 4);
        expect_results(problem, run(problem), results_in_f32(problem));
      }
    }
  }
}

// Groups so large that bias gradients are summed over several chunks of rows.
TEST_P(ExpertsContract, LargeGroupsAreNearF32) {
  for (const auto dtype : dtypes_to_compare()) {
    const ExpertsProblem problem(options_of(16, 24, dtype), Biases::all, {513, 3, 1500, 512}, 8);
    expect_results(problem, run(problem), results_in_f32(problem));
  }
}

TEST_P(ExpertsContract, TensorsMayLieApart) {
  for (const auto dtype : dtypes_to_compare()) {
    for (const auto stage : kStages) {
      const auto options = options_of(48, 40, dtype, Activation::swiglu, stage);
      const ExpertsProblem problem(options, Biases::all, kGroups, 16);
      const auto expected = results_in_f32(problem);
      for (const auto storage : {Storage::apart, Storage::askew}) {
        SCOPED_TRACE(words(options, Biases::all) + (storage == Storage::apart ? "" : ", askew"));
        expect_results(problem, run(problem, {.storage = storage}), expected);
      }
      expect_results(problem, run(problem, {.interleaved = true}), expected);
    }
  }
}

TEST_P(ExpertsContract, SomeExpertsHaveBiases) {
  for (const auto dtype : dtypes_to_compare()) {
    ExpertsProblem problem(options_of(48, 40, dtype), Biases::all, {7, 4, 20, 0}, 1);
    problem.weights[0].gate_bias = {};
    problem.weights[1].down_bias = {};
    problem.weights[2] = {.gate = problem.weights[2].gate,
                          .up = problem.weights[2].up,
                          .down = problem.weights[2].down};
    expect_results(problem, run(problem), results_in_f32(problem));
  }
}

// Gradients to begin with.
std::vector<ExpertGradients> random_gradients(const ExpertsProblem& problem, Dtype inner,
                                              Dtype others) {
  testing::Random random(11);
  std::vector<ExpertGradients> gradients;
  for (const auto& expert : problem.weights) {
    const auto like = [&](const ConstTensorView& weight, Dtype dtype) -> TensorView {
      if (weight.data() == nullptr) return {};
      return random.tensor(weight.shape(), dtype).view();
    };
    gradients.push_back({like(expert.gate, others), like(expert.up, inner),
                         like(expert.down, inner), like(expert.gate_bias, others),
                         like(expert.up_bias, inner), like(expert.down_bias, others)});
  }
  return gradients;
}

TEST_P(ExpertsContract, GradientsAreAddedInEitherDtype) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    const ExpertsProblem problem(options_of(48, 40, dtype), Biases::all, kGroups, 1);
    const auto expected = results_in_f32(problem);
    for (const auto& [inner, others] : {std::pair(dtype, dtype), std::pair(Dtype::f32, Dtype::f32),
                                        std::pair(dtype, Dtype::f32)}) {
      const auto before = random_gradients(problem, inner, others);
      for (const auto mode : {GradientMode::overwrite, GradientMode::accumulate}) {
        const auto results = run(problem, {.mode = mode, .gradients = before});
        for (std::size_t e = 0; e < before.size(); ++e) {
          const auto first = testing::named_tensors(before[e]);
          const auto more = testing::named_tensors(expected.gradients[e]);
          const auto after = testing::named_tensors(results.gradients[e]);
          for (std::size_t i = 0; i < first.size(); ++i) {
            auto sum = doubles_of(more[i].second);
            const auto start = doubles_of(first[i].second);
            for (std::size_t j = 0; mode == GradientMode::accumulate && j < sum.values.size();
                 ++j) {
              sum.values[j] += start.values[j];
            }
            EXPECT_EQ(after[i].second.dtype(), first[i].second.dtype());
            EXPECT_TRUE(near(after[i].second, tensor_of(sum), tolerance_of(problem.options)))
                << first[i].first << " of expert " << e;
            const bool unchanged = mode == GradientMode::accumulate && kGroups[e] == 0;
            if (unchanged) {
              EXPECT_TRUE(same_bits(after[i].second, first[i].second));
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace switchyard::experts_contract_test
