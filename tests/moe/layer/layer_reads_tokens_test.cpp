// SPDX-License-Identifier: Apache-2.0
// A layer whose experts read their rows from tokens does what one does that dispatches them, to
// the bit.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/compare.h"
#include "support/device/token_reading_device.h"
#include "support/layer/layer_alone.h"
#include "support/layer/layer_cases.h"
#include "support/layer/layer_step.h"
#include "switchyard/run_ranks.h"

namespace switchyard::layer_reads_tokens_test {
namespace {

using testing::backward;
using testing::CaseInput;
using testing::gradients_for;
using testing::LayerAlone;
using testing::LayerCase;
using testing::Random;
using testing::same_bits;
using testing::small_layer_options;
using testing::token_reading_device;
using Names = std::vector<std::string>;

Names names_of(const std::vector<LayerStats::Stage>& stages) {
  Names names;
  for (const auto& stage : stages) names.emplace_back(stage.name);
  return names;
}

void expect_same_either_way(const std::vector<LayerCase>& cases) {
  const Device tokens = token_reading_device();
  for (const LayerCase& c : cases) {
    SCOPED_TRACE(c.name);
    const CaseInput in(c);
    expect_same_bits(run_case(c, in, tokens), run_case(c, in, Device()));
  }
}

TEST(LayerReadsTokens, WhateverTheRouter) { expect_same_either_way(testing::router_cases()); }
TEST(LayerReadsTokens, WhateverTheExperts) { expect_same_either_way(testing::expert_cases()); }
TEST(LayerReadsTokens, WhateverThePlan) { expect_same_either_way(testing::plan_cases()); }
TEST(LayerReadsTokens, WhateverIsTrained) { expect_same_either_way(testing::training_cases()); }
TEST(LayerReadsTokens, InBf16) { expect_same_either_way(testing::bf16_cases()); }

// Nobody asks for check(): what has room is computed.
TEST(LayerReadsTokens, WithRowsBeyondTheCapacity) {
  auto options = small_layer_options();
  options.sizing = Sizing::bounded(20, Overflow::fail);
  const Tensor x = Random(1).tensor({15, 20}, Dtype::f32);
  const auto step = [&](const Device& device) {
    LayerAlone alone(options, Biases::none, device);
    SavedForBackward saved;
    Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
    EXPECT_TRUE(alone.layer.plan_status().overflow);
    return std::pair(std::move(y), backward(alone, saved, x));
  };
  const auto actual = step(token_reading_device());
  const auto expected = step(Device());
  EXPECT_TRUE(same_bits(actual.first, expected.first));
  expect_same_bits(actual.second, expected.second);
}

TEST(LayerReadsTokens, InInferenceAndWithoutTheWeightsGradients) {
  for (const auto stage : {WeightStage::output, WeightStage::activation}) {
    auto options = small_layer_options();
    options.weight_stage = stage;
    LayerAlone alone(options, Biases::none, token_reading_device());
    LayerAlone plain(options);
    const Tensor x = Random(1).tensor({15, 20}, Dtype::f32);
    const Tensor y = alone.layer.forward(alone.weights, {.x = x});
    EXPECT_EQ(names_of(alone.layer.stats().forward),
              (Names{"route", "plan", "experts", "activation", "combine"}));
    EXPECT_TRUE(same_bits(y, plain.layer.forward(plain.weights, {.x = x})));

    const auto d_x_of = [&](LayerAlone& layer) {
      SavedForBackward saved;
      (void)layer.layer.forward(layer.weights, {.x = x}, saved);
      Tensor d_x(x.shape(), Dtype::f32);
      layer.layer.backward(layer.weights, saved, x,
                           {.d_x = d_x, .gradients = gradients_for(layer.weights)});
      return d_x;
    };
    EXPECT_TRUE(same_bits(d_x_of(alone), d_x_of(plain)));
  }
}

// No row is made for forward or backward, and none is kept.
TEST(LayerReadsTokens, NothingIsDispatched) {
  for (const auto keep : {Keep::rows, Keep::nothing}) {
    auto options = small_layer_options();
    options.keep = keep;
    LayerAlone alone(options, Biases::none, token_reading_device());
    LayerAlone plain(options);
    const Tensor x = Random(1).tensor({15, 20}, Dtype::f32);
    SavedForBackward saved;
    (void)alone.layer.forward(alone.weights, {.x = x}, saved);
    SavedForBackward plain_saved;
    (void)plain.layer.forward(plain.weights, {.x = x}, plain_saved);
    EXPECT_EQ(saved.bytes(), plain_saved.bytes());
    (void)backward(alone, saved, x);
    EXPECT_EQ(names_of(alone.layer.stats().backward),
              (Names{"experts", "activation", "dispatch_backward", "route_backward"}));
  }
}

TEST(LayerReadsTokens, NotWhereWeightsEnterAtTheInput) {
  auto options = small_layer_options();
  options.weight_stage = WeightStage::input;
  LayerAlone alone(options, Biases::none, token_reading_device());
  (void)alone.layer.forward(alone.weights, {.x = Random(1).tensor({15, 20}, Dtype::f32)});
  EXPECT_EQ(names_of(alone.layer.stats().forward),
            (Names{"route", "plan", "dispatch", "experts", "activation", "combine"}));
}

// There rows are those of other ranks, too.
TEST(LayerReadsTokens, NotAtSeveralRanks) {
  const auto options = small_layer_options();
  const testing::LayerProblem problem(options);
  const auto step = [&](Communicator& comm, Names& names) {
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    MoeLayer layer(comm, placement, options, token_reading_device());
    const auto weights = MoeParameters::random(options, placement, comm.rank(), 5, Biases::none);
    auto results =
        run_step(layer, weights.weights(),
                 input_of(problem, testing::awkward_piece(comm, problem.num_tokens)), Biases::none);
    names = names_of(layer.stats().forward);
    return results;
  };
  Names names;
  const auto one = step(*connect(), names);
  EXPECT_EQ(names, (Names{"route", "plan", "experts", "activation", "combine"}));
  run_ranks(2, [&](Communicator& comm) {
    Names of_rank;
    const auto part = step(comm, of_rank);
    EXPECT_EQ(of_rank, (Names{"route", "plan", "dispatch", "experts", "activation", "combine"}));
    EXPECT_TRUE(same_part(part, testing::awkward_piece(comm, problem.num_tokens), one));
  });
}

}  // namespace
}  // namespace switchyard::layer_reads_tokens_test
