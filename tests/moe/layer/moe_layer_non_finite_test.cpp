// SPDX-License-Identifier: Apache-2.0
// Logits that are not finite: an error on all ranks, or a status that leaves other tokens alone.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::moe_layer_non_finite_test {
namespace {

using testing::error_of;
using testing::gradients_for;
using testing::Random;
using testing::tiny_layer_options;
using testing::tiny_layer_weights;

constexpr auto kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kRanks = 3;

Tensor zeros(const Shape& shape, Dtype dtype = Dtype::f32) { return Tensor::zeros(shape, dtype); }

constexpr auto kNotFinite =
    "rank 1: the router's logits of token 2 are not finite: x or the gate holds NaN or infinity, "
    "or their product overflows";

// x with one NaN, in token 2 of rank 1.
Tensor tokens_of(const Communicator& comm) {
  Tensor x = Random(static_cast<std::uint64_t>(comm.rank())).tensor({4, 6}, Dtype::f32);
  if (comm.rank() == 1) x.span<float>()[2 * 6 + 3] = kNaN;
  return x;
}

TEST(MoeLayerNonFinite, IsTheSameErrorOnAllRanksAndTheNextStepWorks) {
  run_ranks(kRanks, [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(6, kRanks);
    MoeLayer layer(comm, placement, tiny_layer_options());
    const auto weights = tiny_layer_weights(tiny_layer_options(), placement, comm.rank());
    const Tensor x = tokens_of(comm);
    EXPECT_EQ(error_of<InvalidArgument>([&] { (void)layer.forward(weights, {.x = x}); }),
              kNotFinite);
    (void)layer.forward(weights, {.x = zeros({4, 6})});
  });
}

TEST(MoeLayerNonFinite, IsAStatusOfBoundedLayersAndHurtsNoOtherToken) {
  run_ranks(kRanks, [](Communicator& comm) {
    auto options = tiny_layer_options();
    options.sizing = Sizing::bounded(24);
    const auto placement = ExpertPlacement::contiguous(6, kRanks);
    MoeLayer layer(comm, placement, options);
    const auto weights = tiny_layer_weights(options, placement, comm.rank());
    const Tensor x = tokens_of(comm);
    SavedForBackward saved;
    const Tensor y = layer.forward(weights, {.x = x}, saved);
    EXPECT_TRUE(layer.plan_status().non_finite);
    EXPECT_EQ(layer.plan_status().non_finite_message, kNotFinite);
    EXPECT_EQ(error_of<InvalidArgument>([&] { layer.check(); }), kNotFinite);
    for (std::int64_t t = 0; t < 4; ++t) {
      for (const float v : y.view().slice(t, t + 1).span<float>()) {
        EXPECT_TRUE(std::isfinite(v));
        EXPECT_EQ(v == 0.0F, comm.rank() == 1 && t == 2) << t;
      }
    }
    // The experts never saw the token, so their gradients are sound.
    Tensor d_x({4, 6}, Dtype::f32);
    const auto gradients = gradients_for(weights);
    layer.backward(weights, saved, Random(9).tensor({4, 6}, Dtype::f32),
                   {.d_x = d_x, .gradients = gradients});
    for (const auto& expert : gradients.experts) {
      for (const float v : expert.up.span<float>()) EXPECT_TRUE(std::isfinite(v));
    }
    for (const float v : d_x.span<float>()) EXPECT_TRUE(std::isfinite(v));
    for (const float v : gradients.router.gate.span<float>()) EXPECT_TRUE(std::isfinite(v));
    (void)layer.forward(weights, {.x = zeros({4, 6})});
    EXPECT_FALSE(layer.plan_status().non_finite);
    layer.check();
  });
}

}  // namespace
}  // namespace switchyard::moe_layer_non_finite_test
