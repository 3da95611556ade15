// SPDX-License-Identifier: Apache-2.0
// Tokens as they come: strided, none at all, with picks that are refused; and gradients on top of
// others.
#include <gtest/gtest.h>

#include <cstring>

#include "support/compare.h"
#include "support/layer/layer_alone.h"

namespace switchyard::moe_layer_tokens_test {
namespace {

using testing::backward;
using testing::expect_same_bits;
using testing::gradients_for;
using testing::LayerAlone;
using testing::Random;
using testing::same_bits;
using testing::small_layer_options;

// Rows of wider tensors, where they lie.
TensorView spread(const Tensor& rows) {
  Tensor wide({rows.rows(), 27}, rows.dtype());
  testing::poison(wide);
  const TensorView view(wide.data(), rows.dtype(), rows.shape(), 27, wide.view().owner());
  for (std::int64_t r = 0; r < rows.rows(); ++r) {
    std::memcpy(view.row(r), rows.view().row(r), static_cast<std::size_t>(view.row_bytes()));
  }
  return view;
}

TEST(MoeLayerTokens, MayBeStrided) {
  auto options = small_layer_options();
  options.shared_intermediate = 4;
  LayerAlone alone(options);
  const Tensor x = Random(1).tensor({70, 20}, Dtype::f32);
  const Tensor d_y = Random(2).tensor({70, 20}, Dtype::f32);
  SavedForBackward saved;
  const Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
  const auto expected = backward(alone, saved, d_y);
  const auto strided_y = spread(y);
  alone.layer.forward(alone.weights, {.x = spread(x)}, strided_y, &saved);
  EXPECT_TRUE(same_bits(strided_y, y));
  expect_same_bits(backward(alone, saved, spread(d_y)), expected);
  alone.layer.forward(alone.weights, {.x = x}, strided_y, &saved);
  const auto d_x = spread(x);
  alone.layer.backward(alone.weights, saved, d_y,
                       {.d_x = d_x, .gradients = gradients_for(alone.weights)});
  EXPECT_TRUE(same_bits(d_x, expected.d_x));
}

TEST(MoeLayerTokens, NoneGiveZeroGradients) {
  auto options = small_layer_options();
  options.shared_intermediate = 4;
  LayerAlone alone(options, Biases::all);
  const Tensor x({0, 20}, Dtype::f32);
  SavedForBackward saved;
  EXPECT_EQ(alone.layer.forward(alone.weights, {.x = x}, saved).shape(), (Shape{0, 20}));
  const auto g = backward(alone, saved, x);
  auto tensors = testing::named_tensors(g.gradients.shared);
  for (const auto& named : testing::named_tensors(g.gradients.experts[3])) tensors.push_back(named);
  tensors.emplace_back("router's gate", g.gradients.router.gate);
  for (const auto& [name, tensor] : tensors) {
    EXPECT_TRUE(same_bits(tensor, Tensor::zeros(tensor.shape(), Dtype::f32))) << name;
  }
}

// Picks that a bounded plan refuses count as none: for y, for the weights and for the gradients.
TEST(MoeLayerStatus, RefusedPicksAreNone) {
  auto options = small_layer_options();
  options.router = RouterOptions::mixtral(6, 3);
  options.sizing = Sizing::bounded(64);
  LayerAlone alone(options);
  const Tensor x = Random(1).tensor({4, 20}, Dtype::f32);
  const Tensor ids = Tensor::from<std::int32_t>({4, 3}, {0, 1, 2, 3, 3, 4, 5, 9, 1, -7, 2, 2});
  const Tensor none = Tensor::from<std::int32_t>({4, 3}, {0, 1, 2, 3, -1, 4, 5, -1, 1, -1, 2, -1});
  SavedForBackward saved;
  const Tensor expected_y = alone.layer.forward(alone.weights, {.x = x, .expert_ids = none}, saved);
  EXPECT_FALSE(alone.layer.plan_status().bad_ids);
  const auto expected = backward(alone, saved, x);
  const Tensor y = alone.layer.forward(alone.weights, {.x = x, .expert_ids = ids}, saved);
  EXPECT_TRUE(alone.layer.plan_status().bad_ids);
  EXPECT_EQ(alone.layer.plan_status().bad_ids_message,
            "rank 0: expert_ids[1,1] is 3, which the token has picked already");
  EXPECT_TRUE(same_bits(y, expected_y));
  EXPECT_TRUE(same_bits(saved.routing().expert_ids, none));
  expect_same_bits(backward(alone, saved, x), expected);
}

// Accumulating twice is twice once.
TEST(MoeLayerGradients, AreAddedToWhereAsked) {
  auto options = small_layer_options();
  options.shared_intermediate = 4;
  LayerAlone alone(options, Biases::all);
  const Tensor x = Random(1).tensor({16, 20}, Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  const auto once = backward(alone, saved, x);
  auto twice = [&] {
    (void)alone.layer.forward(alone.weights, {.x = x}, saved);
    return backward(alone, saved, x);
  }();
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  alone.layer.backward(
      alone.weights, saved, x,
      {.d_x = twice.d_x, .gradients = twice.gradients, .mode = GradientMode::accumulate});
  EXPECT_TRUE(same_bits(twice.d_x, once.d_x));  // which is never added to
  const auto expect_double = [](const TensorView& actual, const TensorView& single) {
    for (std::size_t i = 0; i < single.span<float>().size(); ++i) {
      ASSERT_FLOAT_EQ(actual.span<float>()[i], 2.0F * single.span<float>()[i]);
    }
  };
  expect_double(twice.gradients.router.gate, once.gradients.router.gate);
  expect_double(twice.gradients.router.gate_bias, once.gradients.router.gate_bias);
  expect_double(twice.gradients.experts[2].down, once.gradients.experts[2].down);
  expect_double(twice.gradients.experts[2].up_bias, once.gradients.experts[2].up_bias);
  expect_double(twice.gradients.shared.gate, once.gradients.shared.gate);
  expect_double(twice.gradients.shared.down_bias, once.gradients.shared.down_bias);
}

}  // namespace
}  // namespace switchyard::moe_layer_tokens_test
