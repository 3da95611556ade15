// SPDX-License-Identifier: Apache-2.0
// The activations of every instruction set and their gradients, against the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "device/activation_constants.h"
#include "device/cpu/simd/elements.h"
#include "support/activation_forms.h"
#include "support/compare.h"
#include "support/random.h"
#include "support/reference/moe_reference.h"
#include "switchyard/experts.h"

namespace switchyard::cpu::activations_test {
namespace {

using testing::ActivationForm;
using testing::kActivationForms;
using testing::Random;
using testing::wide_range;

class ActivationTest : public ::testing::TestWithParam<const ElementKernels*> {
 protected:
  const ElementKernels& kernels() const { return *GetParam(); }
};

// Value and derivatives of an activation, in double, by the reference's own formula.
struct Derivatives {
  double value, d_gate, d_up;
};
Derivatives expected_at(const ExpertsOptions& options, double gate, double up) {
  const bool gated = has_gate(options.activation);
  const auto value = [&](double g, double u) {
    const testing::Doubles none{{1, 1}, {0.0}};
    const testing::ReferenceExpert expert{gated ? none : testing::Doubles{},
                                          none,
                                          {{1, 1}, {1.0}},
                                          gated ? testing::Doubles{{1}, {g}} : testing::Doubles{},
                                          {{1}, {u}}};
    const double x = 0.0;
    return testing::reference_expert(options, expert, &x, 1.0)[0];
  };
  constexpr double kStep = 1e-5;
  return {value(gate, up), (value(gate + kStep, up) - value(gate - kStep, up)) / (2 * kStep),
          (value(gate, up + kStep) - value(gate, up - kStep)) / (2 * kStep)};
}

// Relu's kink; relu2 has a derivative there, but no second one.
bool is_at_kink(Activation activation, float gate, float up) {
  switch (activation) {
    case Activation::relu:
    case Activation::relu2:
      return std::abs(up) < 1e-4F;
    case Activation::reglu:
      return std::abs(gate) < 1e-4F;
    default:
      return false;
  }
}

void expect_reference(const ElementKernels& kernels, const ExpertsOptions& options) {
  const bool gated = has_gate(options.activation);
  const auto constants = constants_of(options);
  std::vector<float> ups = wide_range();
  std::vector<float> gates(ups.rbegin(), ups.rend());
  std::ranges::rotate(gates, gates.begin() + 777);
  const auto n = static_cast<std::int64_t>(ups.size());
  std::vector<float> inner;
  if (gated) inner = gates;
  inner.insert(inner.end(), ups.begin(), ups.end());
  std::vector<float> out(ups.size());
  const auto bytes = [](auto& v) { return reinterpret_cast<std::byte*>(v.data()); };
  const auto index = static_cast<std::size_t>(options.activation);
  constexpr float kWeight = -0.5F;
  kernels.f32.activation[index]({bytes(inner), bytes(out), n, kWeight, constants});
  const std::vector<float> d_out(ups.size(), 2.0F);
  std::vector<float> out_again(ups.size());
  auto gradient = inner;
  const float d_weight = kernels.f32.activation_gradient[index](
      {bytes(gradient), d_out.data(), bytes(out_again), n, kWeight, constants});
  double expected_d_weight = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < ups.size(); ++i) {
    if (is_at_kink(options.activation, gates[i], ups[i])) continue;
    const auto expected = expected_at(options, gates[i], ups[i]);
    // 1e-6 of what is computed with; the smallest values are small rather than exact.
    const double scale = 1.0 + std::abs(ups[i]) * (gated ? 1.0 + std::abs(gates[i]) : 1.0);
    ASSERT_NEAR(out[i], kWeight * expected.value, 1e-6 * std::abs(expected.value) + 1e-7 * scale)
        << gates[i] << ", " << ups[i];
    ASSERT_EQ(out_again[i], out[i]);
    ASSERT_NEAR(gradient[(gated ? ups.size() : 0) + i], 2.0 * kWeight * expected.d_up, 3e-6 * scale)
        << gates[i] << ", " << ups[i];
    if (gated) {
      ASSERT_NEAR(gradient[i], 2.0 * kWeight * expected.d_gate, 3e-6 * scale)
          << gates[i] << ", " << ups[i];
    }
    expected_d_weight += 2.0 * expected.value;
    size += std::abs(2.0 * expected.value);
  }
  EXPECT_NEAR(d_weight, expected_d_weight, 1e-5 * size);
}

TEST_P(ActivationTest, ActivationsAndGradientsAreNearTheReference) {
  for (const ActivationForm& form : kActivationForms) {
    for (const float limit : {6.0F, std::numeric_limits<float>::infinity()}) {
      SCOPED_TRACE(name_of(form) + ", limit " + std::to_string(limit));
      expect_reference(
          kernels(), form.in(ExpertsOptions{.hidden = 1, .intermediate = 1, .clamp_limit = limit}));
    }
  }
}

// In the tail too, where 1 − erf would leave nothing.
TEST_P(ActivationTest, GeluIsAccurateInItsTail) {
  std::vector<float> ups;
  for (int i = 0; i <= 600; ++i) ups.push_back(-6.0F + 0.01F * static_cast<float>(i));
  std::vector<float> inner = ups;
  inner.resize(2 * ups.size(), 1.0F);
  for (const Activation activation : {Activation::gelu, Activation::geglu}) {
    std::vector<float> out(ups.size());
    kernels().f32.activation[static_cast<std::size_t>(activation)](
        {reinterpret_cast<std::byte*>(inner.data()), reinterpret_cast<std::byte*>(out.data()),
         static_cast<std::int64_t>(ups.size())});
    for (std::size_t i = 0; i < ups.size(); ++i) {
      const double expected = 0.5 * ups[i] * std::erfc(-ups[i] / std::numbers::sqrt2);
      ASSERT_NEAR(out[i], expected, 3e-6 * std::abs(expected)) << ups[i];
    }
  }
}

// Gates so negative that the sigmoid is exactly 0.
TEST_P(ActivationTest, HugeNegativeGatesGiveNothing) {
  std::vector<float> inner{-3e38F, -1e36F, -200.0F, 1.0F, 1.0F, 1.0F};
  std::vector<float> out(3);
  kernels().f32.activation[static_cast<std::size_t>(Activation::swiglu)](
      {reinterpret_cast<std::byte*>(inner.data()), reinterpret_cast<std::byte*>(out.data()), 3});
  EXPECT_EQ(out, (std::vector{0.0F, 0.0F, 0.0F}));
}

// NaN in, NaN out, in that place alone; nothing is written beyond the end.
TEST_P(ActivationTest, ActivationsPropagateNaN) {
  for (const ActivationForm& form : kActivationForms) {
    SCOPED_TRACE(name_of(form));
    const bool gated = has_gate(form.activation);
    const auto constants = constants_of(form.in(ExpertsOptions{}));
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const std::int64_t n : {3, 16, 33, 70}) {
        const auto width = gated ? 2 * n : n;
        Tensor inner = Random(3).tensor({width}, dtype);
        testing::poison(inner.view().slice(n - 1, n));
        Tensor out({n + 1}, dtype);
        testing::poison(out);
        const auto& typed = dtype == Dtype::f32 ? kernels().f32 : kernels().bf16;
        typed.activation[static_cast<std::size_t>(form.activation)](
            {inner.data(), out.data(), n, 1.0F, constants});
        const auto values = testing::doubles_of(out.view()).values;
        for (std::int64_t i = 0; i < n - 1; ++i) {
          ASSERT_TRUE(std::isfinite(values[static_cast<std::size_t>(i)]));
        }
        EXPECT_TRUE(std::isnan(values[static_cast<std::size_t>(n - 1)]));
        Tensor nan({1}, dtype);
        testing::poison(nan);
        EXPECT_TRUE(testing::same_bits(out.view().slice(n, n + 1), nan));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, ActivationTest, ::testing::ValuesIn(element_kernels_of_this_cpu()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace switchyard::cpu::activations_test
