// SPDX-License-Identifier: Apache-2.0
// Every message of experts that read their rows from tokens.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/device/experts_problem.h"
#include "support/device/token_reading_device.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::experts_tokens_errors_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::ExpertsProblem;
using testing::gradients_for;

const ExpertsOptions kOptions{.hidden = 6, .intermediate = 4};

Tensor zeros(const Shape& shape, Dtype dtype = Dtype::f32) { return Tensor::zeros(shape, dtype); }

// A step of experts that read 3 tokens with 2 picks each, of which 5 have rows.
struct TokensProblem {
  ExpertsProblem p{kOptions, Biases::none, {2, 3}};
  Experts experts{kOptions, testing::token_reading_device()};
  Tensor x = zeros({3, 6});
  Tensor sources = Tensor::from<std::int32_t>({5}, {0, 1, 2, 4, 5});
  Tensor out = zeros({5, 6});
  Tensor inner = zeros({5, 8});
  TokenRows tokens{.x = x, .row_sources = sources, .top_k = 2};
  std::vector<ExpertGradients> gradients{gradients_for(p.weights[0]), gradients_for(p.weights[1])};

  std::string forward(const ExpertsInput& in) {
    return error_of<InvalidArgument>(
        [&] { experts.forward(p.weights, p.groups(), in, {.out = out, .inner = inner}); });
  }
  std::string backward(const ExpertsBackwardInput& in, const ExpertsBackwardOutput& made) {
    return error_of<InvalidArgument>([&] { experts.backward(p.weights, p.groups(), in, made); });
  }
};

TEST(ExpertsTokensErrors, OfTokens) {
  TokensProblem t;
  const auto error_with = [&](const std::function<void(TokenRows&)>& change) {
    TokenRows tokens = t.tokens;
    change(tokens);
    return t.forward({.tokens = tokens});
  };
  EXPECT_EQ(error_with([](auto&) {}), "no error");
  EXPECT_EQ(error_with([](auto& v) { v.top_k = 0; }), "tokens.top_k (0) must be positive");
  EXPECT_EQ(error_with([](auto& v) { v.row_sources = zeros({5}); }),
            "tokens.row_sources is f32 [5], but must be contiguous i32 [5] or more");
  EXPECT_EQ(error_with([](auto& v) { v.row_sources = zeros({4}, Dtype::i32); }),
            "tokens.row_sources is i32 [4], but must be contiguous i32 [5] or more");
  EXPECT_EQ(error_with([](auto& v) {
              const Tensor wide = zeros({5, 2}, Dtype::i32);
              v.row_sources = {wide.data(), Dtype::i32, {5}, 2, wide.view().owner()};
            }),
            "tokens.row_sources is i32 [5], but must be contiguous i32 [5] or more");
  EXPECT_EQ(error_with([](auto& v) {
              v.x = zeros({3, 6}, Dtype::bf16);
            }),
            "tokens.x is bf16 [3,6], but must be f32 [T,6]");
  EXPECT_EQ(error_with([](auto& v) { v.x = zeros({3}); }),
            "tokens.x is f32 [3], but must be f32 [T,6]");
  const std::string elsewhere_too =
      " is in gpu memory, but the device works in host memory; copy it with Device::copy_of";
  EXPECT_EQ(error_with([](auto& v) { v.x = elsewhere(v.x); }), "tokens.x [3,6]" + elsewhere_too);
  EXPECT_EQ(error_with([](auto& v) { v.row_sources = elsewhere(v.row_sources); }),
            "tokens.row_sources [5]" + elsewhere_too);
  EXPECT_EQ(t.forward({.rows = t.out, .tokens = t.tokens}),
            "rows [5,6] and tokens were both given: give only one of them");
  EXPECT_EQ(t.forward({}), "rows is f32 [0], but must be f32 [5,6] or more rows");
  t.tokens.x = t.out;
  EXPECT_EQ(t.forward({.tokens = t.tokens}), "tokens.x and out must not overlap in memory");
}

TEST(ExpertsTokensErrors, OfExpertsThatReadNone) {
  TokensProblem t;
  const auto error_with = [&](const Experts& experts) {
    return error_of<Unsupported>(
        [&] { experts.forward(t.p.weights, t.p.groups(), {.tokens = t.tokens}, {.out = t.out}); });
  };
  const std::string message =
      "these experts cannot read rows from tokens (see Experts::reads_tokens): give them rows from "
      "Dispatcher::dispatch";
  const Experts on_cpu(kOptions);
  EXPECT_FALSE(on_cpu.reads_tokens());
  EXPECT_TRUE(t.experts.reads_tokens());
  EXPECT_EQ(error_with(on_cpu), message);
  auto options = kOptions;
  options.weight_stage = WeightStage::input;
  EXPECT_EQ(error_with(Experts(options, testing::token_reading_device())), message);
}

TEST(ExpertsTokensErrors, OfWhatTokensHave) {
  TokensProblem t;
  EXPECT_EQ(t.forward({.row_weights = zeros({3, 2}), .tokens = t.tokens}), "no error");
  EXPECT_EQ(t.forward({.row_weights = zeros({5}), .tokens = t.tokens}),
            "row_weights is f32 [5], but for the tokens it must be f32 [3,2]");
  const Tensor wide = zeros({3, 4});
  const ConstTensorView apart(wide.data(), Dtype::f32, {3, 2}, 4);
  EXPECT_EQ(t.forward({.row_weights = apart, .tokens = t.tokens}),
            "row_weights has row stride 4, but must be contiguous");

  const Tensor weights = zeros({3, 2});
  const Tensor d_y = zeros({3, 6});
  ExpertsBackwardInput in{
      .row_weights = weights, .inner = t.inner, .d_out = d_y, .tokens = t.tokens};
  ExpertsBackwardOutput made{.d_rows = t.out, .gradients = t.gradients};
  made.d_row_weights = zeros({3, 2});
  EXPECT_EQ(t.backward(in, made), "no error");
  made.d_row_weights = zeros({2, 2});
  EXPECT_EQ(t.backward(in, made),
            "d_row_weights is f32 [2,2], but for the tokens it must be f32 [3,2]");
  made.d_row_weights = {};
  in.d_out = zeros({5, 6});
  EXPECT_EQ(t.backward(in, made), "d_out is f32 [5,6], but for the tokens it must be f32 [3,6]");
  in.d_out = d_y;
  Tensor rows = zeros({5, 6});
  in.rows = rows;
  EXPECT_EQ(t.backward(in, made), "rows [5,6] and tokens were both given: give only one of them");
  in.rows = {};
  in.tokens->x = made.d_rows.slice(0, 3);
  EXPECT_EQ(t.backward(in, made), "tokens.x and d_rows must not overlap in memory");
}

}  // namespace
}  // namespace switchyard::experts_tokens_errors_test
