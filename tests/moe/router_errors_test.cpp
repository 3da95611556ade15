// SPDX-License-Identifier: Apache-2.0
// Every message of a router.
#include <gtest/gtest.h>

#include <limits>

#include "support/errors.h"
#include "switchyard/error.h"
#include "switchyard/router.h"

namespace switchyard::router_errors_test {
namespace {

using testing::error_of;

constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();

std::string error_with(const RouterOptions& options) {
  return error_of<InvalidArgument>([&] { const Router router(options); });
}

TEST(RouterErrors, OfOptions) {
  auto options = RouterOptions::mixtral(8, 2);
  EXPECT_EQ(error_with(RouterOptions::mixtral(0, 1)), "num_experts (0) must be positive");
  EXPECT_EQ(error_with(RouterOptions::mixtral(8, 0)), "top_k (0) must be 1 to 1024");
  EXPECT_EQ(error_with(RouterOptions::mixtral(8, 5000)), "top_k (5000) must be 1 to 1024");
  EXPECT_EQ(error_with(RouterOptions::mixtral(8, 9)), "top_k (9) must not exceed num_experts (8)");
  EXPECT_EQ(error_with(RouterOptions::deepseek_v3(12, 2)),
            "num_experts (12) must be a multiple of num_expert_groups (8)");
  EXPECT_EQ(error_with(RouterOptions::deepseek_v3(16, 9)),
            "top_k (9) must not exceed the 8 experts of 4 kept groups");
  options.num_expert_groups = 0;
  EXPECT_EQ(error_with(options), "num_experts (8) must be a multiple of num_expert_groups (0)");
  options.num_expert_groups = 2;
  options.kept_expert_groups = 3;
  EXPECT_EQ(error_with(options), "kept_expert_groups (3) must be 1 to num_expert_groups (2)");
  options.kept_expert_groups = 0;
  EXPECT_EQ(error_with(options), "kept_expert_groups (0) must be 1 to num_expert_groups (2)");
  options = RouterOptions::mixtral(8, 2);
  options.scale = kNaN;
  EXPECT_EQ(error_with(options), "scale (nan) must be finite");
}

TEST(RouterErrors, OfWeightsAndTokens) {
  const Router router(RouterOptions::torchtitan(4, 2));
  const Tensor x = Tensor::zeros({3, 6}, Dtype::f32);
  const Tensor gate = Tensor::zeros({4, 6}, Dtype::f32);
  const auto route = [&](const RouterWeights& weights) {
    return error_of<InvalidArgument>([&] { (void)router.route(weights, x); });
  };
  EXPECT_EQ(route({}), "gate [4,6] is missing");
  EXPECT_EQ(route({.gate = Tensor::zeros({4, 5}, Dtype::f32)}),
            "gate is f32 [4,5], but must be [4,6] of f32 or bf16");
  EXPECT_EQ(route({.gate = Tensor::zeros({4, 6}, Dtype::i32)}),
            "gate is i32 [4,6], but must be [4,6] of f32 or bf16");
  EXPECT_EQ(route({.gate = gate, .gate_bias = Tensor::zeros({3}, Dtype::f32)}),
            "gate_bias is f32 [3], but must be [4] of f32 or bf16");
  EXPECT_EQ(route({.gate = gate, .score_bias = Tensor::zeros({5}, Dtype::f32)}),
            "score_bias is f32 [5], but must be [4] of f32 or bf16");
  EXPECT_EQ(route({.gate = gate, .score_bias = Tensor::zeros({4}, Dtype::bf16)}),
            "score_bias is bf16, but must be f32");
  EXPECT_EQ(route({.gate = gate, .score_bias = Tensor::from<float>({4}, {0, 1, kNaN, 0})}),
            "score_bias[2] is nan, but must be finite");
  const Tensor wide = Tensor::zeros({8}, Dtype::f32);
  EXPECT_EQ(route({.gate = gate, .gate_bias = ConstTensorView(wide.data(), Dtype::f32, {4}, 2)}),
            "gate_bias has row stride 2, but must be contiguous");
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              (void)Router(RouterOptions::mixtral(4, 2))
                  .route({.gate = gate, .score_bias = Tensor::zeros({4}, Dtype::f32)}, x);
            }),
            "a score_bias was given, but the router's options have score_bias = none");
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              (void)router.route({.gate = gate}, Tensor::zeros({3, 6}, Dtype::i32));
            }),
            "x is i32 [3,6], but must be [T, H] of f32 or bf16");
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { (void)router.route({.gate = gate}, Tensor::zeros({18}, Dtype::f32)); }),
            "x is f32 [18], but must be [T, H] of f32 or bf16");
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              (void)router.replay({.gate = gate}, x, Tensor::zeros({3, 1}, Dtype::i32));
            }),
            "expert_ids is i32 [3,1], but must be i32 [3,2]");
}

TEST(RouterErrors, OfBackward) {
  const Router router(RouterOptions::torchtitan(4, 2));
  const Tensor x = Tensor::zeros({3, 6}, Dtype::f32);
  const Tensor gate = Tensor::zeros({4, 6}, Dtype::f32);
  const Tensor bias = Tensor::zeros({4}, Dtype::f32);
  Tensor ids = Tensor::zeros({3, 2}, Dtype::i32);
  Tensor d_weights = Tensor::zeros({3, 2}, Dtype::f32);
  Tensor d_x = Tensor::zeros({3, 6}, Dtype::f32);
  Tensor d_gate = Tensor::zeros({4, 6}, Dtype::f32);
  Tensor d_bias = Tensor::zeros({4}, Dtype::f32);
  RouterWeights weights{.gate = gate};
  RouterBackwardInput in{x, ids, d_weights};
  RouterBackwardOutput out{.d_x = d_x, .gradients = {.gate = d_gate}};
  const auto backward = [&] {
    return error_of<InvalidArgument>([&] { router.backward(weights, in, out); });
  };
  EXPECT_EQ(backward(), "no error");
  ids.span<std::int32_t>()[3] = 4;
  EXPECT_EQ(backward(), "expert_ids[1,1] is 4, which is neither -1 nor an expert of 4");
  ids.span<std::int32_t>()[3] = -2;
  EXPECT_EQ(backward(), "expert_ids[1,1] is -2, which is neither -1 nor an expert of 4");
  ids.span<std::int32_t>()[3] = -1;
  in.expert_ids = Tensor::zeros({2, 2}, Dtype::i32);
  EXPECT_EQ(backward(), "expert_ids is i32 [2,2], but must be i32 [3,2]");
  in.expert_ids = ids;
  in.d_weights = Tensor::zeros({3, 3}, Dtype::f32);
  EXPECT_EQ(backward(), "d_weights is f32 [3,3], but must be f32 [3,2]");
  in.d_weights = d_weights;
  out.d_x = Tensor::zeros({3, 6}, Dtype::bf16);
  EXPECT_EQ(backward(), "d_x is bf16 [3,6], but x is f32 [3,6]");
  out.d_x = d_x;
  out.gradients.gate = {};
  EXPECT_EQ(backward(), "gate has a weight, but no gradient was given");
  out.gradients.gate = Tensor::zeros({4, 6}, Dtype::bf16);
  EXPECT_EQ(backward(), "the gradient of gate is bf16 [4,6], but the weight is f32 [4,6]");
  out.gradients.gate = d_gate;
  out.gradients.gate_bias = d_bias;
  EXPECT_EQ(backward(), "gate_bias has no weight, but a gradient was given");
  weights.gate_bias = bias;
  Tensor wide = Tensor::zeros({8}, Dtype::f32);
  out.gradients.gate_bias = TensorView(wide.data(), Dtype::f32, {4}, 2);
  EXPECT_EQ(backward(), "the gradient of gate_bias has row stride 2, but must be contiguous");
  out.gradients.gate_bias = d_bias;
  EXPECT_EQ(backward(), "no error");
}

}  // namespace
}  // namespace switchyard::router_errors_test
