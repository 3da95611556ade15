// SPDX-License-Identifier: Apache-2.0
// The shared expert on every device: what it adds, its gradients, and what bits depend on.
#include <gtest/gtest.h>

#include "device/device_backend.h"
#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/device/device_experts.h"
#include "support/device/devices.h"

namespace switchyard::shared_contract_test {
namespace {

using testing::copy_on;
using testing::near;
using testing::poisoned_on;
using testing::same_bits;
using testing::Storage;
using testing::tolerance_of;
using testing::widened;

struct Problem {
  Problem(const ExpertsOptions& the_options, Biases biases, std::int64_t num_tokens)
      : options(the_options) {
    testing::Random random(6);
    weights = random_expert(random, options, biases);
    for (Tensor* rows : {&x, &y, &d_y, &d_x}) {
      *rows = random.tensor({num_tokens, options.hidden}, options.dtype);
    }
  }

  ExpertsOptions options;
  ExpertWeights weights;
  Tensor x, y, d_y, d_x;  // y and d_x are added to
};

struct Results {
  Tensor y, inner, d_x;
  ExpertGradients gradients;
};

struct Way {
  Storage storage = Storage::together;
  InnerRows inner_rows = InnerRows::kept;
  GradientMode mode = GradientMode::overwrite;
  ExpertGradients gradients = {};  // to begin with; none: NaN
};

// Tokens first … last − 1 of the problem.
Results run_part(const Device& device, const Problem& problem, std::int64_t first,
                 std::int64_t last, const Way& way = {}) {
  const auto& options = problem.options;
  const auto part = [&](const Tensor& rows) {
    return copy_on(device, rows.view().slice(first, last), way.storage);
  };
  const auto take_inner = [&] {
    return poisoned_on(device, {last - first, options.inner_width()}, options.dtype, way.storage);
  };
  const ExpertWeights weights = testing::expert_on(device, problem.weights, way.storage);
  const ExpertGradients gradients = testing::gradients_on(
      device,
      way.gradients.up.data() != nullptr ? way.gradients : testing::gradients_for(problem.weights),
      way.storage);
  const TensorView x = part(problem.x);
  const TensorView y = part(problem.y);
  const TensorView d_x = part(problem.d_x);
  const TensorView inner = take_inner();
  backend_of(device).shared_forward({options, weights, x, inner, y});
  Results results{device.to_host(y), device.to_host(inner), {}, {}};
  const bool kept = way.inner_rows == InnerRows::kept;
  backend_of(device).shared_backward({options, weights, x, kept ? inner : take_inner(),
                                      way.inner_rows, part(problem.d_y), d_x, gradients, way.mode});
  EXPECT_TRUE(same_bits(device.to_host(x), device.to_host(part(problem.x))));
  results.d_x = device.to_host(d_x);
  results.gradients = testing::gradients_of(device, gradients);
  return results;
}

Results run(const Device& device, const Problem& problem, const Way& way = {}) {
  return run_part(device, problem, 0, problem.x.rows(), way);
}

// The CPU's in f32, from the same numbers.
Results results_in_f32(const Problem& problem) {
  ExpertsOptions options = problem.options;
  options.dtype = Dtype::f32;
  Problem wide(options, Biases::none, 0);
  wide.weights = widened(problem.weights);
  wide.x = widened(problem.x);
  wide.y = widened(problem.y);
  wide.d_y = widened(problem.d_y);
  wide.d_x = widened(problem.d_x);
  return run(Device{}, wide);
}

void expect_results(const Results& actual, const Results& expected, double tolerance) {
  EXPECT_TRUE(near(actual.y, expected.y, tolerance));
  EXPECT_TRUE(near(actual.inner, expected.inner, tolerance));
  EXPECT_TRUE(near(actual.d_x, expected.d_x, tolerance));
  const auto tensors = testing::named_tensors(actual.gradients);
  const auto expected_tensors = testing::named_tensors(expected.gradients);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    EXPECT_TRUE(near(tensor, widened(expected_tensors[i].second), tolerance)) << name;
  }
}

class SharedContract : public testing::OnDevices {
 protected:
  // On a CPU f32 would be compared with itself.
  std::vector<Dtype> dtypes_to_compare() const {
    if (device.memory() == Memory::host) return {Dtype::bf16};
    return {Dtype::f32, Dtype::bf16};
  }
};
SWITCHYARD_ON_DEVICES(SharedContract);

// The stage of routed experts' weights means nothing here.
ExpertsOptions options_of(Dtype dtype) {
  return {.hidden = 48, .intermediate = 40, .dtype = dtype, .weight_stage = WeightStage::input};
}

TEST_P(SharedContract, AddsWhatTheReferenceSays) {
  const Problem problem(options_of(Dtype::f32), Biases::all, 20);
  const auto weights = testing::doubles_of(problem.weights);
  const auto x = testing::doubles_of(problem.x.view());
  auto y = testing::doubles_of(problem.y.view());
  for (std::int64_t t = 0; t < 20; ++t) {
    const auto row = testing::reference_expert(problem.options, weights, x.row(t), 1.0);
    for (std::size_t i = 0; i < row.size(); ++i) y.row(t)[i] += row[i];
  }
  EXPECT_TRUE(near(run(device, problem).y, testing::tensor_of(y), 1e-5));
}

TEST_P(SharedContract, AllFormsAreNearF32) {
  for (const auto dtype : dtypes_to_compare()) {
    for (const auto& form : testing::kActivationForms) {
      for (const auto biases : {Biases::none, Biases::all}) {
        for (const std::int64_t num_tokens : {1, 5, 150}) {
          SCOPED_TRACE(name_of(form) + " " + std::string(name_of(dtype)) + " " +
                       std::to_string(num_tokens));
          const Problem problem(form.in(options_of(dtype)), biases, num_tokens);
          const auto kept = run(device, problem);
          expect_results(kept, results_in_f32(problem), tolerance_of(problem.options));
          const auto again = run(device, problem, {.inner_rows = InnerRows::to_be_computed});
          EXPECT_TRUE(same_bits(again.d_x, kept.d_x));
          testing::expect_same_bits(again.gradients, kept.gradients);
        }
      }
    }
  }
}

TEST_P(SharedContract, TensorsMayLieApart) {
  for (const auto dtype : dtypes_to_compare()) {
    const Problem problem(options_of(dtype), Biases::all, 150);
    const auto expected = results_in_f32(problem);
    for (const auto storage : {Storage::apart, Storage::askew}) {
      expect_results(run(device, problem, {.storage = storage}), expected,
                     tolerance_of(problem.options));
    }
  }
}

TEST_P(SharedContract, GradientsAreAdded) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto gradients : {testing::GradientDtype::as_weights, testing::GradientDtype::f32}) {
      const Problem problem(options_of(dtype), Biases::all, 150);
      ExpertGradients ones = testing::gradients_for(problem.weights, gradients);
      for (const auto& [name, tensor] : testing::named_tensors(ones)) {
        const auto shape = tensor.shape();
        testing::Doubles values = testing::zeros(shape);
        for (double& value : values.values) value = 1.0;
        if (tensor.dtype() == Dtype::f32) {
          Device{}.copy(testing::tensor_of(values), tensor);
        } else {
          for (Bfloat16& value : tensor.span<Bfloat16>()) value = to_bfloat16(1.0F);
        }
      }
      const auto results =
          run(device, problem, {.mode = GradientMode::accumulate, .gradients = ones});
      const auto expected = results_in_f32(problem);
      const auto more = testing::named_tensors(expected.gradients);
      const auto after = testing::named_tensors(results.gradients);
      for (std::size_t i = 0; i < after.size(); ++i) {
        auto sum = testing::doubles_of(more[i].second);
        for (double& value : sum.values) value += 1.0;
        EXPECT_TRUE(near(after[i].second, testing::tensor_of(sum), tolerance_of(problem.options)))
            << after[i].first;
      }
    }
  }
}

TEST_P(SharedContract, ATokensBitsDependOnTheTokenAlone) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    const Problem problem(options_of(dtype), Biases::all, 150);
    const auto whole = run(device, problem);
    for (const std::int64_t count : {1, 7, 64, 130}) {
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{5}, 150 - count}) {
        const auto part = run_part(device, problem, first, first + count);
        const auto slice = [&](const Tensor& all) {
          return all.view().slice(first, first + count);
        };
        EXPECT_TRUE(same_bits(part.y, slice(whole.y))) << count << " tokens from " << first;
        EXPECT_TRUE(same_bits(part.inner, slice(whole.inner))) << count << " from " << first;
        EXPECT_TRUE(same_bits(part.d_x, slice(whole.d_x))) << count << " tokens from " << first;
      }
    }
  }
}

TEST_P(SharedContract, InnerValuesNeedNotBeKept) {
  const Problem problem(options_of(Dtype::bf16), Biases::all, 33);
  const TensorView y = copy_on(device, problem.y);
  backend_of(device).shared_forward(
      {.options = problem.options,
       .weights = testing::expert_on(device, problem.weights, Storage::together),
       .x = copy_on(device, problem.x),
       .y = y});
  EXPECT_TRUE(same_bits(get(y), run(device, problem).y));
}

TEST_P(SharedContract, WithoutTokensGradientsAreZeros) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    const Problem problem(options_of(dtype), Biases::all, 0);
    for (const auto& [name, tensor] : testing::named_tensors(run(device, problem).gradients)) {
      EXPECT_TRUE(same_bits(tensor, Tensor::zeros(tensor.shape(), dtype))) << name;
    }
  }
}

}  // namespace
}  // namespace switchyard::shared_contract_test
