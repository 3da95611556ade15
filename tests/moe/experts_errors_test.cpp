// SPDX-License-Identifier: Apache-2.0
// Every message of the experts.
#include <gtest/gtest.h>

#include <limits>

#include "support/device/experts_problem.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::experts_errors_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::ExpertsProblem;
using testing::gradients_for;

const ExpertsOptions kOptions{.hidden = 6, .intermediate = 4};

Tensor zeros(const Shape& shape, Dtype dtype = Dtype::f32) { return Tensor::zeros(shape, dtype); }

TEST(ExpertsErrors, OfOptions) {
  const auto error_with = [](const ExpertsOptions& options) {
    return error_of<InvalidArgument>([&] { const Experts experts(options); });
  };
  EXPECT_EQ(error_with({.hidden = 0, .intermediate = 4}), "hidden (0) must be positive");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = -1}), "intermediate (-1) must be positive");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .dtype = Dtype::i32}),
            "experts are f32 or bf16, not i32");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .clamp_limit = 0.0F}),
            "clamp_limit (0) must be positive");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .clamp_limit = kNan}),
            "clamp_limit (nan) must be positive");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .clamp_limit = kInfinity}), "no error");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .gate_alpha = kInfinity}),
            "gate_alpha (inf) must be finite");
  EXPECT_EQ(error_with({.hidden = 4, .intermediate = 4, .up_offset = kNan}),
            "up_offset (nan) must be finite");
}

TEST(ExpertsErrors, OfWeights) {
  testing::Random random(1);
  const Experts experts(kOptions);
  const auto good = random_expert(random, kOptions, Biases::all);
  const auto error_with = [&](void (*change)(ExpertWeights&)) {
    std::vector<ExpertWeights> weights{good, good};
    change(weights[1]);
    return error_of<InvalidArgument>([&] { experts.check(weights); });
  };
  EXPECT_EQ(error_with([](auto&) {}), "no error");
  EXPECT_EQ(error_with([](auto& e) { e.gate = {}; }), "local expert 1's gate [4,6] is missing");
  EXPECT_EQ(error_with([](auto& e) {
              e.up = zeros({6, 4});
            }),
            "local expert 1's up is f32 [6,4], but must be [4,6] of f32 or bf16");
  EXPECT_EQ(error_with([](auto& e) {
              e.down = zeros({6, 4}, Dtype::bf16);
            }),
            "local expert 1's down is bf16, but the experts are f32");
  EXPECT_EQ(error_with([](auto& e) { e.gate_bias = zeros({3}); }),
            "local expert 1's gate_bias is f32 [3], but must be [4] of f32 or bf16");
  EXPECT_EQ(error_with([](auto& e) {
              const Tensor wide = zeros({8});
              e.up_bias = {wide.data(), Dtype::f32, {4}, 2, wide.view().owner()};
            }),
            "local expert 1's up_bias has row stride 2, but must be contiguous");
  EXPECT_EQ(error_with([](auto& e) { e.down_bias = zeros({6}, Dtype::i32); }),
            "local expert 1's down_bias is i32 [6], but must be [6] of f32 or bf16");
  const Experts ungated({.hidden = 6, .intermediate = 4, .activation = Activation::relu});
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              ungated.check({&good, 1});
            }),
            "local expert 0 has a gate, but its activation, relu, has none");
}

TEST(ExpertsErrors, OfGradients) {
  testing::Random random(1);
  const Experts experts(kOptions);
  const auto weights = random_expert(random, kOptions, Biases::none);
  const auto error_with = [&](void (*change)(ExpertGradients&)) {
    auto gradients = gradients_for(weights);
    change(gradients);
    return error_of<InvalidArgument>([&] { experts.check({&weights, 1}, {&gradients, 1}); });
  };
  EXPECT_EQ(error_with([](auto&) {}), "no error");
  EXPECT_EQ(error_with([](auto& g) { g.up = {}; }),
            "local expert 0's up has a weight, but no gradient was given");
  EXPECT_EQ(error_with([](auto& g) { g.down_bias = zeros({6}); }),
            "local expert 0's down_bias has no weight, but a gradient was given");
  EXPECT_EQ(error_with([](auto& g) {
              g.gate = zeros({4, 6}, Dtype::bf16);
            }),
            "the gradient of local expert 0's gate is bf16 [4,6], but the weight is f32 [4,6]");
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              experts.check({&weights, 1}, {});
            }),
            "there are 1 experts, but gradients for 0");
}

TEST(ExpertsErrors, OfPackedTensors) {
  const auto error_with = [](const PackedExperts& packed, Activation activation) {
    return error_of<InvalidArgument>([&] { (void)unpack(packed, activation); });
  };
  const Tensor gate_up = zeros({2, 8, 6});
  const Tensor down = zeros({2, 6, 4});
  EXPECT_EQ(error_with({.gate_up = gate_up, .down = zeros({3, 6, 4})}, Activation::swiglu),
            "gate_up [2,8,6] and down [3,6,4] do not belong together: they are [e, 2I, H] and "
            "[e, H, I]");
  EXPECT_EQ(error_with({.gate_up = gate_up, .down = down}, Activation::gelu),
            "gate_up [2,8,6] and down [2,6,4] do not belong together: they are [e, I, H] and "
            "[e, H, I]");
  EXPECT_EQ(error_with({.gate_up = gate_up, .down = down, .gate_up_bias = zeros({2, 4})},
                       Activation::swiglu),
            "gate_up_bias is [2,4], but must be [2,8]");
  EXPECT_EQ(error_with({.gate_up = gate_up, .down = down, .down_bias = zeros({2, 4})},
                       Activation::swiglu),
            "down_bias is [2,4], but must be [2,6]");
}

TEST(ExpertsErrors, OfGroups) {
  const ExpertsProblem p(kOptions, Biases::none, {2, 3});
  const Experts experts(kOptions);
  Tensor out(p.rows.shape(), Dtype::f32);
  const auto error_with = [&](const RowGroups& groups) {
    return error_of<InvalidArgument>(
        [&] { experts.forward(p.weights, groups, {.rows = p.rows}, {.out = out}); });
  };
  const auto ints = [](std::initializer_list<std::int32_t> values) {
    return Tensor::from<std::int32_t>({static_cast<std::int64_t>(values.size())}, values);
  };
  EXPECT_EQ(error_with({ints({0, 2}), ints({2, 3})}),
            "row_offsets is i32 [2] and group_rows i32 [2], but for 2 experts they must be i32 "
            "[3] and i32 [2]");
  EXPECT_EQ(error_with({ints({0, 2, 5}), zeros({2})}),
            "row_offsets is i32 [3] and group_rows f32 [2], but for 2 experts they must be i32 "
            "[3] and i32 [2]");
  EXPECT_EQ(error_with({ints({0, 2, 5}), ints({2, 3}), 0}),
            "groups are aligned to 0 rows, but this device's experts need a multiple of 1");
  EXPECT_EQ(error_with({ints({0, 2, 4}), ints({2, 3})}),
            "the group of local expert 1 has 3 rows, but begins at 2 and the next at 4");
  EXPECT_EQ(error_with({ints({-1, 2, 5}), ints({2, 3})}),
            "the group of local expert 0 has 2 rows, but begins at -1 and the next at 2");
  EXPECT_EQ(error_with({ints({0, 2, 5}), ints({2, -3})}),
            "the group of local expert 1 has -3 rows, but begins at 2 and the next at 5");
  const auto lowest = std::numeric_limits<std::int32_t>::min();
  EXPECT_EQ(error_with({ints({0, 2, lowest}), ints({2, 3})}),
            "the group of local expert 1 has 3 rows, but begins at 2 and the next at -2147483648");
  EXPECT_EQ(error_with({ints({0, 2, 9}), ints({2, 3})}),
            "rows is f32 [8,6], but must be f32 [9,6] or more rows");
}

TEST(ExpertsErrors, OfRows) {
  const ExpertsProblem p(kOptions, Biases::none, {2, 3});
  const Experts experts(kOptions);
  Tensor rows = zeros({5, 6});
  Tensor inner = zeros({5, 8});
  const Tensor weights = zeros({5});
  const auto forward = [&](const ExpertsInput& in, const ExpertsOutput& out) {
    return error_of<InvalidArgument>([&] { experts.forward(p.weights, p.groups(), in, out); });
  };
  EXPECT_EQ(forward({.rows = rows}, {.out = rows, .inner = inner}), "no error");
  EXPECT_EQ(forward({.rows = zeros({5, 6}, Dtype::bf16)}, {.out = rows}),
            "rows is bf16 [5,6], but must be f32 [5,6] or more rows");
  EXPECT_EQ(forward({.rows = rows}, {.out = zeros({4, 6})}),
            "out is f32 [4,6], but must be f32 [5,6] or more rows");
  EXPECT_EQ(forward({.rows = rows}, {.out = rows, .inner = zeros({5, 4})}),
            "inner is f32 [5,4], but must be f32 [5,8] or more rows");
  EXPECT_EQ(forward({.rows = rows, .row_weights = zeros({4})}, {.out = rows}),
            "row_weights is f32 [4], but must be contiguous f32 [5] or more");

  std::vector<ExpertGradients> gradients;
  for (const auto& expert : p.weights) gradients.push_back(gradients_for(expert));
  ExpertsBackwardInput in{.rows = rows, .row_weights = weights, .inner = inner, .d_out = rows};
  Tensor d_rows = zeros({5, 6});
  ExpertsBackwardOutput out{.d_rows = d_rows, .gradients = gradients};
  const auto backward = [&] {
    return error_of<InvalidArgument>([&] { experts.backward(p.weights, p.groups(), in, out); });
  };
  EXPECT_EQ(backward(), "no error");
  out.d_row_weights = zeros({2});
  EXPECT_EQ(backward(), "d_row_weights is f32 [2], but must be contiguous f32 [5] or more");
  out.d_row_weights = zeros({5});
  in.row_weights = {};
  EXPECT_EQ(backward(), "d_row_weights was given without row_weights: give both or neither");
  out.d_row_weights = {};
  in.d_out = zeros({5, 5});
  EXPECT_EQ(backward(), "d_out is f32 [5,5], but must be f32 [5,6] or more rows");
  in.d_out = rows;
  in.inner = zeros({3, 8});
  EXPECT_EQ(backward(), "inner is f32 [3,8], but must be f32 [5,8] or more rows");
  in.inner = inner;
  out.d_rows = zeros({6});
  EXPECT_EQ(backward(), "d_rows is f32 [6], but must be f32 [5,6] or more rows");
  out.d_rows = d_rows;
  in.d_out = d_rows;
  EXPECT_EQ(backward(), "d_out and d_rows must not overlap in memory");
  in.d_out = rows;
  out.d_rows = rows;
  EXPECT_EQ(backward(), "d_out and d_rows must not overlap in memory");
  in.d_out = zeros({5, 6});
  EXPECT_EQ(backward(), "rows and d_rows must not overlap in memory");
  out.d_rows = d_rows;
  out.gradients = {gradients.data(), 1};
  EXPECT_EQ(backward(), "there are 2 experts, but gradients for 1");
}

TEST(ExpertsErrors, OfMemory) {
  const ExpertsProblem p(kOptions, Biases::none, {2, 3});
  const Experts experts(kOptions);
  Tensor rows = zeros({5, 6});
  Tensor weights = zeros({5});
  const auto message = [](const std::string& tensor) {
    return tensor +
           " is in gpu memory, but the device works in host memory; copy it with Device::copy_of";
  };
  const auto forward = [&](const std::vector<ExpertWeights>& matrices, const RowGroups& groups,
                           const ExpertsInput& in) {
    return error_of<InvalidArgument>([&] { experts.forward(matrices, groups, in, {.out = rows}); });
  };
  EXPECT_EQ(forward(p.weights, p.groups(), {.rows = elsewhere(rows)}), message("rows [5,6]"));
  EXPECT_EQ(forward(p.weights, p.groups(), {.rows = rows, .row_weights = elsewhere(weights)}),
            message("row_weights [5]"));
  auto groups = p.groups();
  groups.row_offsets = elsewhere(groups.row_offsets);
  EXPECT_EQ(forward(p.weights, groups, {.rows = rows}), message("row_offsets [3]"));
  groups = p.groups();
  groups.group_rows = elsewhere(groups.group_rows);
  EXPECT_EQ(forward(p.weights, groups, {.rows = rows}), message("group_rows [2]"));
  auto matrices = p.weights;
  matrices[1].down = elsewhere(matrices[1].down);
  EXPECT_EQ(forward(matrices, p.groups(), {.rows = rows}), message("local expert 1's down [6,4]"));
  std::vector<ExpertGradients> gradients;
  for (const auto& expert : p.weights) gradients.push_back(gradients_for(expert));
  gradients[0].up = elsewhere(gradients[0].up);
  EXPECT_EQ(error_of<InvalidArgument>([&] { experts.check(p.weights, gradients); }),
            message("the gradient of local expert 0's up [4,6]"));
}

}  // namespace
}  // namespace switchyard::experts_errors_test
