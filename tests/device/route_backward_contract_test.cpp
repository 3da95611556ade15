// SPDX-License-Identifier: Apache-2.0
// The router's gradients on every device.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/compare.h"
#include "support/device/devices.h"
#include "support/device/route_problem.h"
#include "support/random.h"

namespace switchyard::route_backward_contract_test {
namespace {

using testing::backward_on;
using testing::near;
using testing::poison;
using testing::Random;
using testing::reference_backward;
using testing::route_cases;
using testing::route_on;
using testing::RouteBackwardInputs;
using testing::RouteCase;
using testing::RouteGradients;
using testing::RouteInputs;
using testing::RouteSlopes;
using testing::same_bits;
using testing::set_element;

class RouteBackwardContract : public testing::OnDevices {};
SWITCHYARD_ON_DEVICES(RouteBackwardContract);

// Returns gradients before backward: zeros for d_x, and values to be overwritten elsewhere.
RouteGradients gradients_for(const RouteCase& test, Dtype gate) {
  RouteGradients start{.d_x = Tensor::zeros({test.num_tokens, test.hidden + test.gap}, test.x),
                       .gate = Tensor({test.options.num_experts, test.hidden}, gate)};
  poison(start.gate);
  if (test.gate_bias) {
    start.bias = Tensor({test.options.num_experts}, gate);
    poison(*start.bias);
  }
  return start;
}

RouteSlopes slopes_for(const RouteCase& test, LossScores scores) {
  Random random(29);
  RouteSlopes slopes{.scores = scores, .sequence_tokens = 40};
  slopes.by_score =
      random.tensor({(test.num_tokens + 39) / 40, test.options.num_experts}, Dtype::f32);
  slopes.by_square = Tensor::from<float>({1}, {0.03F});
  return slopes;
}

// A GPU may cut f32 into two terms of bf16 where the other factor is bf16: 2⁻¹⁷.
double tolerance(Dtype dtype, Dtype inputs) {
  if (dtype == Dtype::bf16) return 4e-3;
  return inputs == Dtype::bf16 ? 2e-5 : 1e-5;
}

void expect_gradients(const RouteGradients& actual, const RouteGradients& expected) {
  const Dtype x = actual.d_x.dtype();
  EXPECT_TRUE(near(actual.d_x, expected.d_x, tolerance(x, x)));
  EXPECT_TRUE(near(actual.gate, expected.gate, tolerance(actual.gate.dtype(), x)));
  if (!actual.bias) return;
  EXPECT_TRUE(near(*actual.bias, *expected.bias, tolerance(actual.bias->dtype(), x)));
}

Tensor d_weights_for(const RouteCase& test) {
  return Random(23).tensor({test.num_tokens, test.options.top_k}, Dtype::f32);
}

TEST_P(RouteBackwardContract, GradientsAreTheReferences) {
  for (const auto& test : route_cases()) {
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    const auto routing = route_on(device, inputs);
    const Tensor d_weights = d_weights_for(test);
    const std::vector<bool> all_count(static_cast<std::size_t>(test.num_tokens));
    const auto as_routed = slopes_for(test, LossScores::as_routed);
    const auto shares = slopes_for(test, LossScores::shares);
    const RouteSlopes zero;
    for (const auto* slopes :
         {static_cast<const RouteSlopes*>(nullptr), &zero, &as_routed, &shares}) {
      const RouteBackwardInputs backward{routing.expert_ids, d_weights, slopes};
      const auto expected = reference_backward(inputs, backward, all_count);
      for (const auto gate : {test.gate, Dtype::f32}) {
        expect_gradients(backward_on(device, inputs, backward, gradients_for(test, gate)),
                         expected);
      }
    }
  }
}

// Padding, tokens that are not finite and tokens without picks may hold NaN.
TEST_P(RouteBackwardContract, TokensWithoutPartAreLeftOut) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& test : route_cases()) {
    if (test.num_tokens < 12) continue;
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    auto ids = route_on(device, inputs).expert_ids.clone();
    inputs.pad_every_third();
    set_element(inputs.x, 7, 1, kNan);
    set_element(inputs.x, 11, 1, kNan);
    const auto top_k = static_cast<std::size_t>(test.options.top_k);
    for (std::size_t k = 0; k < top_k; ++k) ids.span<std::int32_t>()[7 * top_k + k] = -1;
    ids.span<std::int32_t>()[1 * top_k] = -1;
    std::vector<bool> without_part;
    for (std::int64_t t = 0; t < test.num_tokens; ++t) {
      without_part.push_back(t % 3 == 0 || t == 7 || t == 11);
    }
    const Tensor d_weights = d_weights_for(test);
    const auto slopes = slopes_for(test, LossScores::as_routed);
    for (const auto* losses : {static_cast<const RouteSlopes*>(nullptr), &slopes}) {
      const RouteBackwardInputs backward{ids, d_weights, losses};
      const auto actual = backward_on(device, inputs, backward, gradients_for(test, test.gate));
      RouteInputs finite(test);
      expect_gradients(actual, reference_backward(finite, backward, without_part));
    }
  }
}

TEST_P(RouteBackwardContract, GradientsAreAddedToAndTheSameInEveryRun) {
  for (const auto& test : route_cases()) {
    SCOPED_TRACE(test.name);
    RouteInputs inputs(test);
    const auto routing = route_on(device, inputs);
    const Tensor d_weights = d_weights_for(test);
    RouteBackwardInputs backward{routing.expert_ids, d_weights};
    const auto plain = backward_on(device, inputs, backward, gradients_for(test, Dtype::f32));
    backward.mode = GradientMode::accumulate;
    RouteGradients ones = gradients_for(test, Dtype::f32);
    const auto set_ones = [](const TensorView& view) {
      for (std::int64_t r = 0; r < view.rows(); ++r) {
        for (std::int64_t c = 0; c < view.shape().row_elements(); ++c)
          set_element(view, r, c, 1.0F);
      }
    };
    set_ones(ones.d_x);
    set_ones(ones.gate);
    if (ones.bias) set_ones(*ones.bias);
    const auto first = backward_on(device, inputs, backward, ones);
    const auto again = backward_on(device, inputs, backward, ones);
    EXPECT_TRUE(same_bits(again.d_x, first.d_x));
    EXPECT_TRUE(same_bits(again.gate, first.gate));
    for (std::size_t i = 0; i < first.gate.span<float>().size(); ++i) {
      ASSERT_EQ(first.gate.span<float>()[i], 1.0F + plain.gate.span<float>()[i]);
    }
    if (!first.bias) continue;
    EXPECT_TRUE(same_bits(*again.bias, *first.bias));
    for (std::size_t i = 0; i < first.bias->span<float>().size(); ++i) {
      ASSERT_EQ(first.bias->span<float>()[i], 1.0F + plain.bias->span<float>()[i]);
    }
  }
}

// Enough tokens for several parts of the gate's gradient, the last of them short, and enough
// columns for a GPU's block to have several tiles.
TEST_P(RouteBackwardContract, ManyTokensAddUp) {
  for (const auto dtype : {Dtype::f32, Dtype::bf16}) {
    const RouteCase test{"many", RouterOptions::mixtral(8, 2), 9001, 520, dtype, dtype, true};
    RouteInputs inputs(test);
    const auto routing = route_on(device, inputs);
    const Tensor d_weights = d_weights_for(test);
    const RouteBackwardInputs backward{routing.expert_ids, d_weights};
    const std::vector<bool> all_count(9001);
    expect_gradients(backward_on(device, inputs, backward, gradients_for(test, Dtype::f32)),
                     reference_backward(inputs, backward, all_count));
  }
}

TEST_P(RouteBackwardContract, NoTokensGiveZerosOrNothing) {
  const RouteCase test{"none", RouterOptions::mixtral(8, 2), 0, 16, Dtype::bf16, Dtype::bf16, true};
  RouteInputs inputs(test);
  const Tensor ids({0, 2}, Dtype::i32);
  const Tensor d_weights({0, 2}, Dtype::f32);
  RouteBackwardInputs backward{ids, d_weights};
  const auto zeroed = backward_on(device, inputs, backward, gradients_for(test, Dtype::bf16));
  EXPECT_TRUE(same_bits(zeroed.gate, Tensor::zeros({8, 16}, Dtype::bf16)));
  EXPECT_TRUE(same_bits(*zeroed.bias, Tensor::zeros({8}, Dtype::bf16)));
  backward.mode = GradientMode::accumulate;
  RouteGradients start{.d_x = Tensor({0, 16}, Dtype::bf16),
                       .gate = Random(1).tensor({8, 16}, Dtype::bf16),
                       .bias = Random(2).tensor({8}, Dtype::bf16)};
  const auto kept = backward_on(device, inputs, backward, start);
  EXPECT_TRUE(same_bits(kept.gate, start.gate));
  EXPECT_TRUE(same_bits(*kept.bias, *start.bias));
}

// Tests for GPUs only.
class CudaRouteBackward : public testing::OnDevices {};
INSTANTIATE_TEST_SUITE_P(CudaRoute, CudaRouteBackward, ::testing::Values("cuda"),
                         [](const auto& param) { return param.param; });

// The tokens [first, last) of a problem, with what reaches them.
struct TokenRange {
  std::int64_t first;
  std::int64_t last;

  Tensor of(const Tensor& tensor) const {
    return Device().copy_of(tensor.view().slice(first, last));
  }
};

// There are so many tokens that every block has several tiles, of more than one run of tokens.
TEST_P(CudaRouteBackward, ATokensGradientDependsOnItAlone) {
  constexpr std::int64_t kTokens = 9001;
  for (const int experts : {8, 130, 330}) {
    SCOPED_TRACE(experts);
    const RouteCase test{"many",     RouterOptions::mixtral(experts, 2), kTokens, 1032, Dtype::bf16,
                         Dtype::bf16};
    RouteInputs inputs(test);
    Random random(5);
    const Tensor ids =
        random.expert_ids({.num_tokens = kTokens, .top_k = 2, .num_experts = experts});
    const Tensor d_weights = d_weights_for(test);
    RouteGradients start = gradients_for(test, Dtype::f32);
    start.d_x = random.tensor({kTokens, test.hidden}, Dtype::bf16);
    const auto all = backward_on(device, inputs, {ids, d_weights}, start);
    RouteInputs alone(test);
    for (const TokenRange& some : {TokenRange{0, 1}, {4440, 4700}, {kTokens - 1, kTokens}}) {
      SCOPED_TRACE(some.first);
      alone.test.num_tokens = some.last - some.first;
      alone.x = some.of(inputs.x);
      const Tensor its_ids = some.of(ids);
      const Tensor its_d_weights = some.of(d_weights);
      RouteGradients its_start = gradients_for(alone.test, Dtype::f32);
      its_start.d_x = some.of(start.d_x);
      const auto its = backward_on(device, alone, {its_ids, its_d_weights}, its_start);
      EXPECT_TRUE(same_bits(its.d_x, all.d_x.view().slice(some.first, some.last)));
    }
  }
}

// So many columns that the gate's gradient has few parts, and each of them many stages. Padding at
// every place in a stage holds NaN.
TEST_P(CudaRouteBackward, EqualsThePortableKernels) {
  const Device portable = Device::cuda({.kernels = CudaKernels::portable});
  for (const int experts : {64, 128}) {
    SCOPED_TRACE(experts);
    const RouteCase test{"wide",     RouterOptions::mixtral(experts, 2), 3000, 8192, Dtype::bf16,
                         Dtype::bf16};
    RouteInputs inputs(test);
    inputs.pad_every_third();
    for (std::int64_t t = 0; t < test.num_tokens; t += 3) {
      for (std::int64_t h = t % 61; h < test.hidden; h += 61) {
        set_element(inputs.x, t, h, std::numeric_limits<float>::quiet_NaN());
      }
    }
    const Tensor ids =
        Random(5).expert_ids({.num_tokens = test.num_tokens, .top_k = 2, .num_experts = experts});
    const Tensor d_weights = d_weights_for(test);
    const RouteBackwardInputs backward{ids, d_weights};
    const auto start = gradients_for(test, Dtype::f32);
    const auto expected = backward_on(portable, inputs, backward, start);
    const auto actual = backward_on(device, inputs, backward, start);
    EXPECT_TRUE(near(actual.d_x, expected.d_x, 4e-3));
    EXPECT_TRUE(near(actual.gate, expected.gate, 1e-4));  // the logits of long rows are large
  }
}

// Rows that no vector load and no TMA copy can address.
TEST_P(CudaRouteBackward, AlignmentChangesNoBit) {
  for (const int experts : {60, 128}) {
    SCOPED_TRACE(experts);
    RouteCase test{"apart", RouterOptions::mixtral(experts, 2), 700, 264, Dtype::bf16, Dtype::bf16};
    RouteInputs inputs(test);
    RouteGradients start = gradients_for(test, Dtype::f32);
    test.gap = 1;
    RouteInputs apart(test);
    RouteGradients apart_start = gradients_for(test, Dtype::f32);
    const auto spread = [](const Tensor& from, Tensor& to) {
      for (std::int64_t r = 0; r < from.shape()[0]; ++r) {
        std::copy_n(from.view().row(r), from.view().row_bytes(), to.view().row(r));
      }
    };
    spread(inputs.x, apart.x);
    spread(inputs.gate, apart.gate);
    const auto routing = route_on(device, inputs);
    const auto apart_routing = route_on(device, apart);
    EXPECT_TRUE(same_bits(apart_routing.expert_ids, routing.expert_ids));
    EXPECT_TRUE(same_bits(apart_routing.weights, routing.weights));
    const Tensor d_weights = d_weights_for(test);
    const RouteBackwardInputs backward{routing.expert_ids, d_weights};
    const auto expected = backward_on(device, inputs, backward, start);
    const auto actual = backward_on(device, apart, backward, apart_start);
    EXPECT_TRUE(same_bits(actual.d_x, expected.d_x));
    EXPECT_TRUE(same_bits(actual.gate, expected.gate));
  }
}

}  // namespace
}  // namespace switchyard::route_backward_contract_test
