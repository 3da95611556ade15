// SPDX-License-Identifier: Apache-2.0
// The router's losses: their values and gradients, and that neither depends on the ranks.
#include "switchyard/losses.h"

#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "support/reference/reference_losses.h"
#include "switchyard/mesh.h"

namespace switchyard::losses_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::doubles_of;
using testing::gradients_for;
using testing::LayerAlone;
using testing::movers_of;
using testing::near;
using testing::numeric_gradient;
using testing::on_all;
using testing::on_ranks;
using testing::part_of;
using testing::Random;
using testing::RankCase;
using testing::reference_losses;
using testing::same_bits;
using testing::small_layer_options;
using testing::tensor_of;

constexpr int kExperts = 6;
constexpr std::int64_t kHidden = 20;  // of small_layer_options
constexpr RouterLosses kWeights{.balance = 0.7F, .z = 0.3F};

struct Case {
  std::string name;
  RouterOptions router;
  LossOptions losses;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  const auto softmax = RouterOptions::mixtral(kExperts, 2);
  const auto sigmoid = RouterOptions::torchtitan(kExperts, 3);
  const auto biased = RouterOptions::kempner_forge_sigmoid(kExperts, 2);
  using enum BalanceLoss;
  return {{"softmax_batch", softmax, {.balance = batch}},
          {"softmax_sequence", softmax, {.balance = sequence}},
          {"softmax_z", softmax, {.z = true}},
          {"softmax_all", softmax, {.balance = batch, .z = true}},
          {"sigmoid_batch", sigmoid, {.balance = batch}},
          {"sigmoid_shares", sigmoid, {.balance = batch, .scores = LossScores::shares}},
          {"sigmoid_sequence_shares",
           sigmoid,
           {.balance = sequence, .scores = LossScores::shares, .z = true}},
          {"biased_all", biased, {.balance = batch, .z = true}},
          {"biased_sequence", biased, {.balance = sequence, .z = true}}};
}

MoeLayerOptions options_of(const Case& c) {
  auto options = small_layer_options();
  options.router = c.router;
  options.losses = c.losses;
  return options;
}

RouterLosses weights_for(const LossOptions& losses) {
  return {.balance = losses.balance == BalanceLoss::none ? 0.0F : kWeights.balance,
          .z = losses.z ? kWeights.z : 0.0F};
}

class LayerLosses : public ::testing::TestWithParam<Case> {};

TEST_P(LayerLosses, AreThoseOfTheReferenceAndSoAreTheirGradients) {
  const auto options = options_of(GetParam());
  const auto& losses = options.losses;
  LayerAlone alone(options, Biases::all);
  const SequenceShard shard(3, 5, 1, 0);
  const Tensor x = Random(3).tensor({15, kHidden}, Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x, .sequence = shard}, saved);
  const auto ids = saved.routing().expert_ids.span<std::int32_t>();
  const std::vector<std::int32_t> chosen(ids.begin(), ids.end());

  auto router = doubles_of(alone.weights.router);
  auto tokens = doubles_of(x);
  const auto expected = reference_losses(options.router, losses, router, tokens, chosen, 5);
  const auto weights = weights_for(losses);
  if (losses.balance != BalanceLoss::none) {
    EXPECT_NEAR(saved.losses().balance, expected.balance, 1e-6 * expected.balance);
  } else {
    EXPECT_EQ(saved.losses().balance, 0.0F);
  }
  EXPECT_NEAR(saved.losses().z, losses.z ? expected.z : 0.0, 1e-6 * expected.z);

  // Nothing but the losses has a gradient here.
  const Tensor d_y = Tensor::zeros(x.shape(), Dtype::f32);
  Tensor d_x(x.shape(), Dtype::f32);
  const auto gradients = gradients_for(alone.weights);
  alone.layer.backward(alone.weights, saved, {.d_y = d_y, .d_losses = weights},
                       {.d_x = d_x, .gradients = gradients});
  const auto loss = [&] {
    const auto now = reference_losses(options.router, losses, router, tokens, chosen, 5);
    return double{weights.balance} * now.balance + double{weights.z} * now.z;
  };
  const auto numeric = numeric_gradient(router, loss);
  EXPECT_TRUE(near(gradients.router.gate, tensor_of(numeric.gate), 1e-5));
  EXPECT_TRUE(near(gradients.router.gate_bias, tensor_of(numeric.gate_bias), 1e-5));
  EXPECT_TRUE(near(d_x, tensor_of(numeric_gradient(tokens, loss)), 1e-5));
}

INSTANTIATE_TEST_SUITE_P(All, LayerLosses, ::testing::ValuesIn(cases()),
                         [](const auto& param) { return param.param.name; });

struct Results {
  RouterLosses losses;
  Tensor d_x = {};
  Tensor d_gate = {};
};

struct Tokens {
  ConstTensorView x, d_y;
  std::optional<SequenceShard> sequence = {};
};

Results run(const LayerComms& groups, const MoeLayerOptions& options, const Tokens& tokens) {
  Random random(11);
  const auto placement = ExpertPlacement::contiguous(kExperts, groups.experts.size());
  const auto weights =
      part_of(random_layer(random, options, Biases::none), placement, groups.experts.rank());
  MoeLayer layer(groups, placement, options);
  SavedForBackward saved;
  (void)layer.forward(weights, {.x = tokens.x, .sequence = tokens.sequence}, saved);
  Results results{.losses = saved.losses(), .d_x = Tensor(tokens.x.shape(), Dtype::f32)};
  const auto gradients = gradients_for(weights);
  layer.backward(weights, saved, {.d_y = tokens.d_y, .d_losses = weights_for(options.losses)},
                 {.d_x = results.d_x, .gradients = gradients});
  results.d_gate = copy_of(gradients.router.gate);
  return results;
}

bool same_losses(const RouterLosses& a, const RouterLosses& b) {
  return a.balance == b.balance && a.z == b.z;
}

class LossesOnRanks : public ::testing::TestWithParam<RankCase> {};

TEST_P(LossesOnRanks, HaveTheBitsOfOneRankHoweverTokensAreCut) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const Tensor x = Random(3).tensor({500, kHidden}, Dtype::f32);
    const Tensor d_y = Random(4).tensor({500, kHidden}, Dtype::f32);
    const auto piece = awkward_piece(comm, 500);
    const auto alone = connect();
    for (const Case& c : cases()) {
      if (c.losses.balance == BalanceLoss::sequence) continue;
      const auto one = run({.experts = *alone}, options_of(c), {x, d_y});
      for (const MoverKind mover : movers_of(comm)) {
        auto options = options_of(c);
        options.mover = mover;
        const auto many = run({.experts = comm}, options, {piece.of(x), piece.of(d_y)});
        EXPECT_TRUE(on_all(comm, same_losses(many.losses, one.losses))) << c.name;
        EXPECT_TRUE(on_all(comm, same_bits(many.d_x, piece.of(one.d_x)))) << c.name;
        Tensor d_gate = copy_of(many.d_gate);
        comm.all_reduce(d_gate);
        EXPECT_TRUE(near(d_gate, one.d_gate, 2e-6)) << c.name;
      }
    }
  });
}

// Rows of the tokens of a shard, in their order.
Tensor rows_of(const Tensor& whole, const SequenceShard& shard) {
  Tensor rows({shard.num_tokens(), whole.shape()[1]}, Dtype::f32);
  for (std::int64_t b = 0; b < shard.batch(); ++b) {
    const auto first = b * shard.length() + shard.offset();
    const auto from = whole.view().slice(first, first + shard.count());
    std::copy_n(from.data(), from.bytes(), rows.view().row(b * shard.count()));
  }
  return rows;
}

TEST_P(LossesOnRanks, OfSequencesHaveTheBitsOfOneRankHoweverSequencesAreCut) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const std::int64_t batch = 4;
    const std::int64_t length = 9;  // some ranks of 7 and 8 have no tokens
    const Tensor x = Random(3).tensor({batch * length, kHidden}, Dtype::f32);
    const Tensor d_y = Tensor::zeros({batch * length, kHidden}, Dtype::f32);
    const auto alone = connect();
    const SequenceShard whole(batch, length, 1, 0);
    const SequenceShard shard(batch, length, comm.size(), comm.rank());
    for (const Case& c : cases()) {
      if (c.losses.balance != BalanceLoss::sequence) continue;
      const auto one = run({.experts = *alone}, options_of(c), {x, d_y, whole});
      const Tensor own_x = rows_of(x, shard);
      const Tensor own_d_y = rows_of(d_y, shard);
      const auto many =
          run({.experts = comm, .sequence = &comm}, options_of(c), {own_x, own_d_y, shard});
      EXPECT_TRUE(on_all(comm, same_losses(many.losses, one.losses))) << c.name;
      EXPECT_TRUE(on_all(comm, same_bits(many.d_x, rows_of(one.d_x, shard)))) << c.name;
    }
  });
}

TEST_P(LossesOnRanks, OfScopeRankAreThoseOfARankAlone) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto num_tokens = std::int64_t{5} * ((comm.rank() + 1) % 3);
    const Tensor x = Random(40 + static_cast<std::uint64_t>(comm.rank()))
                         .tensor({num_tokens, kHidden}, Dtype::f32);
    const Tensor d_y = Tensor::zeros(x.shape(), Dtype::f32);
    const auto alone = connect();
    auto options = options_of(cases()[3]);
    options.losses.scope = LossScope::rank;
    const auto many = run({.experts = comm}, options, {x, d_y});
    const auto one = run({.experts = *alone}, options, {x, d_y});
    EXPECT_TRUE(on_all(comm, same_losses(many.losses, one.losses)));
    EXPECT_TRUE(on_all(comm, same_bits(many.d_x, one.d_x)));
    EXPECT_TRUE(on_all(comm, same_bits(many.d_gate, one.d_gate)));
    EXPECT_TRUE(on_all(comm, num_tokens > 0 || same_losses(many.losses, {})));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LossesOnRanks, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

class LossesOnMeshes : public ::testing::TestWithParam<RankCase> {};

TEST_P(LossesOnMeshes, AreGlobalOverTheBatchNotOverTheExpertsGroup) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}, {"sp", 2}});
    const std::int64_t batch = 4;
    const std::int64_t length = 7;
    const Tensor x = Random(3).tensor({batch * length, kHidden}, Dtype::f32);
    const Tensor d_y = Tensor::zeros(x.shape(), Dtype::f32);
    const auto alone = connect();
    // Sequences are cut over sp, and whole ones over dp and ep.
    const SequenceShard shard(batch / 4, length, 2, mesh.coordinate("sp"));
    const auto first = (mesh.coordinate("dp") * 2 + mesh.coordinate("ep")) * length;
    const auto own = [&](const Tensor& whole) {
      return rows_of(copy_of(whole.view().slice(first, first + length)), shard);
    };
    for (const Case& c : cases()) {
      const auto one =
          run({.experts = *alone}, options_of(c), {x, d_y, SequenceShard(batch, length, 1, 0)});
      const Tensor own_x = own(x);
      const Tensor own_d_y = own(d_y);
      for (const MoverKind mover : movers_of(world)) {
        auto options = options_of(c);
        options.mover = mover;
        const auto many =
            run({.experts = mesh.comm({"ep"}), .batch = &world, .sequence = &mesh.comm({"sp"})},
                options, {own_x, own_d_y, shard});
        EXPECT_TRUE(on_all(world, same_losses(many.losses, one.losses))) << c.name;
        EXPECT_TRUE(on_all(world, same_bits(many.d_x, own(one.d_x)))) << c.name;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LossesOnMeshes, ::testing::ValuesIn(testing::rank_cases_of(8)),
                         testing::rank_case_name);

TEST(Losses, OfAnEvenRouterAreOne) {
  auto options = small_layer_options();
  options.losses = {.balance = BalanceLoss::batch};
  LayerAlone alone(options);
  alone.weights.router.gate = Tensor::zeros({kExperts, kHidden}, Dtype::f32);
  const Tensor x = Random(1).tensor({8, kHidden}, Dtype::f32);
  SavedForBackward saved;
  (void)alone.layer.forward(alone.weights, {.x = x}, saved);
  EXPECT_FLOAT_EQ(saved.losses().balance, 1.0F);  // Σ f = 1, and every P is 1/E
  EXPECT_EQ(saved.losses().z, 0.0F);
}

}  // namespace
}  // namespace switchyard::losses_test
