// What a layer keeps for backward: how much it is, and that the bits do not depend on it.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/moe_tensors.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

using testing::gradients_for;
using testing::part_of;
using testing::Random;
using testing::same_bits;

MoeLayerOptions small_options() {
  return {.hidden = 20, .intermediate = 12, .router = RouterOptions::mixtral(6, 2)};
}

// One rank with everything.
struct Alone {
  explicit Alone(const MoeLayerOptions& options, ExpertBiases biases = ExpertBiases::none)
      : layer(*world, ExpertPlacement::contiguous(options.router.num_experts, 1), options) {
    Random random(4);
    weights = random_layer(random, options, biases);
  }

  std::unique_ptr<Communicator> world = connect();
  MoeLayer layer;
  MoeWeights weights;
};

struct Gradients {
  Tensor d_x, d_weights;
  MoeGradients gradients;
};

Gradients backward(Alone& alone, SavedForBackward& saved, const Tensor& d_y,
                   std::int64_t top_k = 2) {
  Gradients g{Tensor(d_y.shape(), d_y.dtype()), Tensor({d_y.rows(), top_k}, Dtype::f32),
              gradients_for(alone.weights)};
  alone.layer.backward(alone.weights, saved, d_y,
                       {.d_x = g.d_x, .gradients = g.gradients, .d_weights = g.d_weights});
  return g;
}

void expect_same_bits(const Gradients& a, const Gradients& b) {
  EXPECT_TRUE(same_bits(a.d_x, b.d_x));
  EXPECT_TRUE(same_bits(a.d_weights, b.d_weights));
  EXPECT_TRUE(same_bits(a.gradients.router.gate, b.gradients.router.gate));
  for (std::size_t e = 0; e < a.gradients.experts.size(); ++e) {
    testing::expect_same_bits(a.gradients.experts[e], b.gradients.experts[e]);
  }
  testing::expect_same_bits(a.gradients.shared, b.gradients.shared);
}

class MoeLayerKeepTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(MoeLayerKeepTest, NothingOfItChangesABit) {
  for (const auto stage : {WeightStage::output, WeightStage::activation, WeightStage::input}) {
    auto options = small_options();
    options.dtype = GetParam();
    options.weight_stage = stage;
    options.shared_intermediate = 8;
    const Tensor x = Random(1).tensor({70, 20}, GetParam());
    const Tensor d_y = Random(2).tensor({70, 20}, GetParam());
    std::optional<Gradients> first;
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      options.keep = keep;
      Alone alone(options, ExpertBiases::all);
      SavedForBackward saved;
      const Tensor y = alone.layer.forward(alone.weights, {.x = x}, saved);
      EXPECT_TRUE(same_bits(alone.layer.forward(alone.weights, {.x = x}), y));  // inference
      Gradients g = backward(alone, saved, d_y);
      if (first) expect_same_bits(g, *first);
      if (!first) first = std::move(g);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, MoeLayerKeepTest, ::testing::Values(Dtype::f32, Dtype::bf16));

// Two forwards before their backwards: what is saved is each step's own.
TEST(MoeLayerKeep, StepsMayOverlap) {
  Alone alone(small_options());
  const Tensor a = Random(1).tensor({30, 20}, Dtype::f32);
  const Tensor b = Random(2).tensor({50, 20}, Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = a}, saved);
  const auto expected = backward(alone, saved, a);
  SavedForBackward saved_b;
  (void)alone.layer.forward(alone.weights, {.x = a}, saved);
  (void)alone.layer.forward(alone.weights, {.x = b}, saved_b);
  (void)backward(alone, saved_b, b);
  expect_same_bits(backward(alone, saved, a), expected);
}

// On one rank: x, what the experts computed inside, and integers.
TEST(MoeLayerKeep, BytesAreWhatIsDocumented) {
  constexpr std::int64_t kT = 33, kK = 2, kH = 20, kI = 12, kE = 6;
  const std::int64_t routing = 2 * kT * kK * 4;                           // ids and weights
  const std::int64_t plan = 3 * kT * kK * 4 + 2 * (kE + 1) * 4 + kE * 4;  // slots, targets, sources
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const auto keep : {Keep::rows, Keep::activations, Keep::nothing}) {
      for (const std::int64_t shared : {0, 5}) {
        auto options = small_options();
        options.dtype = dtype;
        options.keep = keep;
        options.shared_intermediate = shared;
        Alone alone(options);
        SavedForBackward saved;
        const Tensor x = Random(1).tensor({kT, kH}, dtype);
        (void)alone.layer.forward(alone.weights, {.x = x}, saved);
        const std::int64_t inner = keep == Keep::nothing ? 0 : kT * kK * 2 * kI + kT * 2 * shared;
        EXPECT_EQ(saved.bytes(), (kT * kH + inner) * size_of(dtype) + routing + plan);
        EXPECT_EQ(saved.plan().num_tokens(), kT);
        EXPECT_EQ(saved.routing().weights.shape(), (Shape{kT, kK}));
        (void)backward(alone, saved, x);
        EXPECT_EQ(saved.bytes(), 0);
      }
    }
  }
}

TEST(MoeLayerKeep, ReceivedRowsCountAtSeveralRanks) {
  run_ranks(2, [](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(6, 2);
    Random random(4);
    const auto weights =
        part_of(random_layer(random, small_options(), ExpertBiases::none), placement, comm.rank());
    std::int64_t bytes[2]{};
    for (const auto keep : {Keep::activations, Keep::rows}) {
      auto options = small_options();
      options.keep = keep;
      MoeLayer layer(comm, placement, options);
      SavedForBackward saved;
      (void)layer.forward(weights, {.x = Random(1).tensor({9, 20}, Dtype::f32)}, saved);
      bytes[keep == Keep::rows ? 1 : 0] = saved.bytes();
      EXPECT_EQ(bytes[1], keep == Keep::rows
                              ? bytes[0] + saved.plan().num_rows() * 20 * size_of(Dtype::f32)
                              : 0);
    }
  });
}

// Picks that a bounded plan refuses count as none: for y, for the weights and for the gradients.
TEST(MoeLayerStatus, RefusedPicksAreNone) {
  auto options = small_options();
  options.router = RouterOptions::mixtral(6, 3);
  options.sizing = Sizing::bounded(64);
  Alone alone(options);
  const Tensor x = Random(1).tensor({4, 20}, Dtype::f32);
  const Tensor ids = Tensor::from<std::int32_t>({4, 3}, {0, 1, 2, 3, 3, 4, 5, 9, 1, -7, 2, 2});
  const Tensor none = Tensor::from<std::int32_t>({4, 3}, {0, 1, 2, 3, -1, 4, 5, -1, 1, -1, 2, -1});
  SavedForBackward saved;
  const Tensor expected_y = alone.layer.forward(alone.weights, {.x = x, .expert_ids = none}, saved);
  EXPECT_FALSE(alone.layer.status().bad_ids);
  const auto expected = backward(alone, saved, x, 3);
  const Tensor y = alone.layer.forward(alone.weights, {.x = x, .expert_ids = ids}, saved);
  EXPECT_TRUE(alone.layer.status().bad_ids);
  EXPECT_EQ(alone.layer.status().bad_ids_message,
            "rank 0: expert_ids[1,1] is 3, which the token has picked already");
  EXPECT_TRUE(same_bits(y, expected_y));
  EXPECT_TRUE(same_bits(saved.routing().expert_ids, none));
  expect_same_bits(backward(alone, saved, x, 3), expected);
}

// Accumulating twice is twice once.
TEST(MoeLayerGradients, AreAddedToWhereAsked) {
  auto options = small_options();
  options.shared_intermediate = 4;
  Alone alone(options, ExpertBiases::all);
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
}  // namespace switchyard
