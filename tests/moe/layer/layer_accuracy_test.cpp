// SPDX-License-Identifier: Apache-2.0
// How far results lie from double precision, by dtype and shape: the table of docs/reliability.md.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "support/reference/swiglu_reference.h"
#include "switchyard/moe_layer.h"

namespace switchyard::layer_accuracy_test {
namespace {

using testing::Doubles;
using testing::doubles_of;
using testing::Random;

constexpr int kExperts = 8;
constexpr std::int64_t kTokens = 48;

// The most that the norm of an error may be of the norm of the exact result.
struct Bounds {
  double y = 0.0;
  double d_x = 0.0;
  double d_weights = 0.0;  // of experts
};

struct AccuracyCase {
  Dtype dtype = Dtype::f32;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t top_k = 0;
  Bounds bounds;
};
void PrintTo(const AccuracyCase& c, std::ostream* out) {
  *out << name_of(c.dtype) << " H=" << c.hidden << " I=" << c.intermediate << " K=" << c.top_k;
}

class Errors {
 public:
  void add(const Doubles& actual, const Doubles& exact) {
    for (std::size_t i = 0; i < exact.values.size(); ++i) {
      const double difference = actual.values[i] - exact.values[i];
      error_ += difference * difference;
      size_ += exact.values[i] * exact.values[i];
    }
  }
  double relative() const { return std::sqrt(error_ / size_); }

 private:
  double error_ = 0.0;
  double size_ = 0.0;
};

void expect_bounded(double error, double bound, const char* what) {
  std::ostringstream text;
  text << error;
  ::testing::Test::RecordProperty(what, text.str());  // for --gtest_output
  EXPECT_LE(error, bound) << what;
  EXPECT_GT(error, bound / 50) << what << ": the bound says too little";
}

class LayerAccuracy : public ::testing::TestWithParam<AccuracyCase> {};

TEST_P(LayerAccuracy, IsWithinItsBounds) {
  const AccuracyCase& c = GetParam();
  const MoeLayerOptions options{.hidden = c.hidden,
                                .intermediate = c.intermediate,
                                .router = RouterOptions::mixtral(kExperts, c.top_k),
                                .dtype = c.dtype};
  testing::LayerAlone alone(options);
  Random random(11);
  const Tensor x = random.tensor({kTokens, c.hidden}, c.dtype);
  const Tensor d_y = random.tensor({kTokens, c.hidden}, c.dtype);
  const Tensor ids =
      random.expert_ids({.num_tokens = kTokens, .top_k = c.top_k, .num_experts = kExperts});
  const Tensor weights = random.tensor({kTokens, c.top_k}, Dtype::f32);
  SavedForBackward saved;
  const Tensor y = alone.layer.forward(
      alone.weights, {.x = x, .expert_ids = ids, .expert_weights = weights}, saved);
  const auto results = backward(alone, saved, d_y);

  testing::SwigluProblem problem{
      .x = doubles_of(x), .d_y = doubles_of(d_y), .weights = doubles_of(weights)};
  const auto numbers = ids.span<std::int32_t>();
  problem.expert_ids.assign(numbers.begin(), numbers.end());
  for (const auto& expert : alone.weights.experts) problem.experts.push_back(doubles_of(expert));
  const auto exact = testing::reference_swiglu(problem);

  Errors of_y;
  of_y.add(doubles_of(y), exact.y);
  Errors of_d_x;
  of_d_x.add(doubles_of(results.d_x), exact.d_x);
  Errors of_weights;
  for (std::size_t e = 0; e < exact.gradients.size(); ++e) {
    const ExpertGradients& actual = results.gradients.experts[e];
    of_weights.add(doubles_of(actual.gate), exact.gradients[e].gate);
    of_weights.add(doubles_of(actual.up), exact.gradients[e].up);
    of_weights.add(doubles_of(actual.down), exact.gradients[e].down);
  }
  expect_bounded(of_y.relative(), c.bounds.y, "y");
  expect_bounded(of_d_x.relative(), c.bounds.d_x, "d_x");
  expect_bounded(of_weights.relative(), c.bounds.d_weights, "d_weights");
}

constexpr Bounds kBf16{.y = 5e-3, .d_x = 4.5e-3, .d_weights = 4e-3};
INSTANTIATE_TEST_SUITE_P(
    , LayerAccuracy,
    ::testing::Values(AccuracyCase{Dtype::f32, 64, 64, 2, {4e-7, 5e-7, 4e-7}},
                      AccuracyCase{Dtype::f32, 256, 512, 2, {8e-7, 1e-6, 8e-7}},
                      AccuracyCase{Dtype::f32, 256, 512, 8, {1e-6, 1e-6, 1e-6}},
                      AccuracyCase{Dtype::f32, 1024, 512, 2, {1e-6, 1e-6, 1e-6}},
                      AccuracyCase{Dtype::bf16, 64, 64, 2, kBf16},
                      AccuracyCase{Dtype::bf16, 256, 512, 2, kBf16},
                      AccuracyCase{Dtype::bf16, 256, 512, 8, kBf16},
                      AccuracyCase{Dtype::bf16, 1024, 512, 2, kBf16}));

}  // namespace
}  // namespace switchyard::layer_accuracy_test
