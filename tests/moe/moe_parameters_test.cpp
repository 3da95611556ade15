// SPDX-License-Identifier: Apache-2.0
#include "switchyard/moe_parameters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/layer/moe_tensors.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"

namespace switchyard::moe_parameters_test {
namespace {

using testing::error_of;
using testing::named_tensors;
using testing::same_bits;

MoeLayerOptions small_options() {
  return {.hidden = 16,
          .intermediate = 9,
          .router = RouterOptions::torchtitan(5, 2),
          .shared_intermediate = 4};
}

// An expert is the same wherever it lives; the replicated tensors are the same everywhere.
TEST(MoeParameters, DependOnTheSeedAndTheExpertAlone) {
  const auto alone = ExpertPlacement::contiguous(5, 1);
  const auto spread = ExpertPlacement::from_owners({1, 0, 1, 0, 1}, 2);
  const auto whole = MoeParameters::random(small_options(), alone, 0, 7, Biases::all);
  for (int rank = 0; rank < 2; ++rank) {
    const auto part = MoeParameters::random(small_options(), spread, rank, 7, Biases::all);
    const auto weights = part.weights();
    EXPECT_TRUE(same_bits(weights.router.gate, whole.weights().router.gate));
    testing::expect_same_bits(part.weights().shared, whole.weights().shared);
    const auto ids = spread.experts_of(rank);
    ASSERT_EQ(weights.experts.size(), ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      testing::expect_same_bits(part.weights().experts[i],
                                whole.weights().experts[static_cast<std::size_t>(ids[i])]);
    }
  }
  const auto other = MoeParameters::random(small_options(), alone, 0, 8);
  EXPECT_FALSE(same_bits(other.weights().router.gate, whole.weights().router.gate));
  EXPECT_FALSE(same_bits(whole.weights().experts[0].up, whole.weights().experts[1].up));
}

// On a device as on the host, and one tensor of a kind after the other, from packed tensors and
// from others.
TEST(MoeParameters, AreCopiedIntoPackedMemory) {
  const auto placement = ExpertPlacement::contiguous(5, 1);
  const Device device = Device::cpu({.num_threads = 2});
  auto original = MoeParameters::random(small_options(), placement, 0, 7, Biases::all);
  testing::Random random(3);
  auto scattered = original.views();
  for (auto& expert : scattered.experts) {
    Tensor apart({9, 20}, Dtype::f32);
    expert.up = TensorView(apart.data(), Dtype::f32, {9, 16}, 20, apart.view().owner());
    device.copy(random.tensor({9, 16}, Dtype::f32), expert.up);
  }
  for (const auto& from : {original, MoeParameters::of(scattered)}) {
    const auto copy = from.copy_on(device);
    const auto& views = copy.weights();
    for (std::size_t e = 0; e < 5; ++e) {
      testing::expect_same_bits(views.experts[e], from.weights().experts[e]);
      EXPECT_NE(views.experts[e].down.data(), from.weights().experts[e].down.data());
      EXPECT_EQ(views.experts[e].up.data(), views.experts[e].gate.row(9));
      EXPECT_EQ(views.experts[e].up_bias.data(), views.experts[e].gate_bias.row(9));
      EXPECT_EQ(views.experts[e].gate.data(),
                views.experts[0].gate.data() +
                    static_cast<int>(e) * 18 * views.experts[0].gate.row_bytes());
      EXPECT_EQ(views.experts[e].down.data(),
                views.experts[0].down.data() +
                    static_cast<int>(e) * 16 * views.experts[0].down.row_bytes());
    }
    testing::expect_same_bits(views.shared, from.weights().shared);
    EXPECT_TRUE(same_bits(views.router.gate, from.weights().router.gate));
    EXPECT_TRUE(same_bits(views.router.gate_bias, from.weights().router.gate_bias));
    EXPECT_TRUE(same_bits(views.router.score_bias, from.weights().router.score_bias));
  }
  const auto made = MoeParameters::random(small_options(), placement, 0, 7, Biases::all, device);
  testing::expect_same_bits(made.weights().experts[3], original.weights().experts[3]);
}

// Also not the same numbers one place further.
TEST(MoeParameters, NeighbouringSeedsHaveNothingInCommon) {
  const auto placement = ExpertPlacement::contiguous(5, 1);
  const auto first = MoeParameters::random(small_options(), placement, 0, 1);
  const auto second = MoeParameters::random(small_options(), placement, 0, 2);
  const auto a = first.weights().router.gate.span<float>();
  const auto b = second.weights().router.gate.span<float>();
  int equal = 0;
  for (std::size_t i = 0; i < a.size(); ++i) equal += std::ranges::count(a, b[i]) > 0 ? 1 : 0;
  EXPECT_LE(equal, 1);
}

TEST(MoeParameters, ArePlausiblyDistributed) {
  const auto parameters =
      MoeParameters::random(small_options(), ExpertPlacement::contiguous(5, 1), 0, 7);
  double sum = 0.0;
  double most = 0.0;
  const auto weights = parameters.weights();
  for (const auto& expert : weights.experts) {
    for (const float v : expert.up.span<float>()) {
      sum += v;
      most = std::max(most, std::abs(static_cast<double>(v)));
    }
  }
  EXPECT_LE(most, 0.25);  // 1/√16
  EXPECT_GE(most, 0.24);
  EXPECT_LE(std::abs(sum), 12.0);  // of 720 values; the deviation is 3.9
}

TEST(MoeParameters, FitTheirLayerAndBecomeZero) {
  const auto world = connect();
  const auto placement = ExpertPlacement::contiguous(5, 1);
  for (const auto biases : {Biases::none, Biases::all}) {
    auto options = small_options();
    options.activation = Activation::gelu;
    auto parameters = MoeParameters::random(options, placement, 0, 1, biases);
    MoeLayer layer(*world, placement, options);
    const Tensor x = testing::Random(1).tensor({3, 16}, Dtype::f32);
    (void)layer.forward(parameters.weights(), {.x = x});
    parameters.set_zero();
    EXPECT_TRUE(same_bits(layer.forward(parameters.weights(), {.x = x}),
                          Tensor::zeros({3, 16}, Dtype::f32)));
  }
}

template <typename Parameters>
concept CanBeWritten = requires(Parameters& parameters) {
  parameters.views();
};
static_assert(CanBeWritten<MoeParameters> && !CanBeWritten<const MoeParameters>);

TEST(MoeParameters, AreReadWhereTheyAreWritten) {
  const auto placement = ExpertPlacement::contiguous(5, 1);
  auto parameters = MoeParameters::random(small_options(), placement, 0, 1, Biases::all);
  auto copy = parameters.copy_on(Device());
  copy = parameters;
  EXPECT_EQ(copy.weights().experts[2].up.data(), parameters.views().experts[2].up.data());
  EXPECT_EQ(copy.views().router.gate.data(), parameters.weights().router.gate.data());
  EXPECT_EQ(&copy.views(), &copy.views());
  EXPECT_EQ(&copy.weights(), &copy.weights());
}

TEST(MoeParameters, MayViewTensorsOfTheCaller) {
  const auto placement = ExpertPlacement::contiguous(5, 1);
  auto original = MoeParameters::random(small_options(), placement, 0, 1, Biases::all);
  auto parameters = MoeParameters::of(original.views());
  EXPECT_EQ(parameters.views().experts[4].down.data(), original.views().experts[4].down.data());
  EXPECT_EQ(parameters.weights().router.gate.data(), original.weights().router.gate.data());
  parameters.set_zero();
  EXPECT_EQ(original.weights().shared.up.span<float>()[3], 0.0F);
}

TEST(MoeParametersErrors, NameTheValues) {
  const auto placement = ExpertPlacement::contiguous(5, 2);
  auto options = small_options();
  EXPECT_EQ(error_of<InvalidArgument>([&] { const MoeParameters p(options, placement, 2); }),
            "rank (2) must be 0 to 1");
  auto tensors = MoeParameters(options, placement, 0).views();
  tensors.experts[1].up = testing::elsewhere(tensors.experts[1].up);
  EXPECT_EQ(
      error_of<InvalidArgument>([&] { (void)MoeParameters::of(tensors); }),
      "a tensor of the layer " + tensors.experts[1].up.shape().to_string() +
          " is in gpu memory, but the device works in host memory; copy it with Device::copy_of");
  options.hidden = 0;
  EXPECT_EQ(error_of<InvalidArgument>([&] { const MoeParameters p(options, placement, 0); }),
            "hidden (0) and intermediate (9) must be positive");
}

}  // namespace
}  // namespace switchyard::moe_parameters_test
