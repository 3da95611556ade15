// SPDX-License-Identifier: Apache-2.0
// One model and one batch over every mesh of eight ranks: after reduce_gradients all gradients are
// those of one rank, without a factor of any axis.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/compare.h"
#include "support/layer/mesh_model.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"
#include "switchyard/sequence.h"

namespace switchyard::mesh_gradients_test {
namespace {

using testing::MeshModel;
using testing::near;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr int kRanks = 8;
constexpr int kExperts = 6;  // fewer than ranks: some own none
constexpr std::int64_t kBatch = 4;
constexpr std::int64_t kLength = 6;
constexpr std::int64_t kHidden = 12;
constexpr double kTolerance = 2e-6;

// Everything global that could bring in a factor.
std::vector<MoeLayerOptions> layer_options() {
  MoeLayerOptions options{.hidden = kHidden,
                          .intermediate = 10,
                          .router = RouterOptions::mixtral(kExperts, 2),
                          .shared_intermediate = 5,
                          .losses = {.balance = BalanceLoss::batch, .z = true}};
  std::vector<MoeLayerOptions> layers{options, options};
  layers[1].gradient_scale = GradientScale::global;
  return layers;
}

struct Division {
  int pp = 1;
  int dp = 1;
  int ep = 1;
  int sp = 1;
  std::vector<std::string> experts = {"ep"};  // the axes of expert parallelism

  int tokens() const { return dp * ep * sp; }  // ranks that share out the tokens
  int expert_ranks() const { return experts.size() == 2 ? ep * sp : ep; }
  std::vector<MeshAxis> mesh() const { return {{"pp", pp}, {"dp", dp}, {"ep", ep}, {"sp", sp}}; }
};

std::ostream& operator<<(std::ostream& out, const Division& d) {
  return out << "pp=" << d.pp << " dp=" << d.dp << " ep=" << d.ep << " sp=" << d.sp
             << " experts over " << d.experts.size() << " axes";
}

// Every way to write the number of ranks as a product, with either kind of EP group.
std::vector<Division> divisions_of(int num_ranks, int pp) {
  std::vector<Division> result;
  for (int dp = 1; dp <= num_ranks / pp; ++dp) {
    for (int ep = 1; dp * ep <= num_ranks / pp; ++ep) {
      const int sp = num_ranks / pp / dp / ep;
      if (pp * dp * ep * sp != num_ranks) continue;
      result.push_back({pp, dp, ep, sp, {"ep"}});
      result.push_back({pp, dp, ep, sp, {"ep", "sp"}});
    }
  }
  return result;
}

// The global tokens of one rank: dp and ep share out the sequences, sp cuts each of them.
std::vector<std::int64_t> tokens_of(const Division& d, int rank_of_stage) {
  const SequenceShard sequences(1, kBatch, d.dp * d.ep, rank_of_stage / d.sp);
  const SequenceShard shard(sequences.count(), kLength, d.sp, rank_of_stage % d.sp);
  std::vector<std::int64_t> tokens;
  for (std::int64_t b = 0; b < shard.batch(); ++b) {
    for (std::int64_t i = 0; i < shard.count(); ++i) {
      tokens.push_back((sequences.offset() + b) * kLength + shard.offset() + i);
    }
  }
  return tokens;
}

Tensor rows_of(const Tensor& whole, const std::vector<std::int64_t>& tokens) {
  Tensor rows({static_cast<std::int64_t>(tokens.size()), kHidden}, Dtype::f32);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::copy_n(whole.view().row(tokens[i]), whole.view().row_bytes(),
                rows.view().row(static_cast<std::int64_t>(i)));
  }
  return rows;
}

void expect_near(const ExpertWeights& actual, const ExpertWeights& expected) {
  const auto wanted = testing::named_tensors(expected);
  const auto tensors = testing::named_tensors(actual);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(near(tensors[i].second, wanted[i].second, kTolerance)) << wanted[i].first;
  }
}

void expect_gradients_of_one_rank(const Division& division, const MeshModel& model,
                                  const MeshModel& one) {
  EXPECT_TRUE(near(model.d_scale(), one.d_scale(), kTolerance));
  for (const auto& layer : model.layers()) {
    const auto actual = layer.gradients->weights();
    const auto expected = one.layers()[static_cast<std::size_t>(layer.id)].gradients->weights();
    const auto& losses = one.layers()[static_cast<std::size_t>(layer.id)].losses;
    EXPECT_FLOAT_EQ(layer.losses.balance, losses.balance);
    EXPECT_FLOAT_EQ(layer.losses.z, losses.z);
    EXPECT_TRUE(near(actual.router.gate, expected.router.gate, kTolerance));
    EXPECT_TRUE(near(actual.router.gate_bias, expected.router.gate_bias, kTolerance));
    expect_near(actual.shared, expected.shared);
    const auto ids = layer.block.placement.experts_of(layer.block.rank());
    ASSERT_EQ(actual.experts.size(), ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto& wanted = expected.experts[static_cast<std::size_t>(ids[i])];
      expect_near(actual.experts[i], wanted);
      if (division.expert_ranks() == division.tokens()) {
        testing::expect_same_bits(actual.experts[i], wanted);
      }
    }
  }
}

void expect_as_one_rank(Communicator& world, const Division& division) {
  SCOPED_TRACE(::testing::Message() << division << ", rank " << world.rank());
  Random random(30);
  const Tensor x = random.tensor({kBatch * kLength, kHidden}, Dtype::f32);
  const Tensor d_out = random.tensor({kBatch * kLength, kHidden}, Dtype::f32);
  // One rank has the tokens in the order of the ranks: a sum's bits depend on it.
  std::vector<std::int64_t> all;
  for (int r = 0; r < division.tokens(); ++r) {
    const auto tokens = tokens_of(division, r);
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  ASSERT_EQ(all.size(), static_cast<std::size_t>(kBatch * kLength));
  const auto alone = connect();
  Mesh one_mesh(*alone, Division{}.mesh());
  MeshModel one(one_mesh, {}, layer_options());
  one.step(rows_of(x, all), rows_of(d_out, all));

  Mesh mesh(world, division.mesh());
  MeshModel model(mesh, {.experts = division.experts}, layer_options());
  const auto mine = tokens_of(division, world.rank() % division.tokens());
  model.step(rows_of(x, mine), rows_of(d_out, mine));
  expect_gradients_of_one_rank(division, model, one);
  std::vector<std::int64_t> places;
  for (const auto token : mine) places.push_back(std::ranges::find(all, token) - all.begin());
  EXPECT_TRUE(near(model.d_x(), rows_of(one.d_x(), places), kTolerance));
}

class MeshGradientsTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(MeshGradientsTest, AreThoseOfOneRankOnEveryMesh) {
  const auto divisions = divisions_of(kRanks, 1);
  ASSERT_EQ(divisions.size(), 20U);
  on_ranks(GetParam(), [&](Communicator& world) {
    for (const auto& division : divisions) expect_as_one_rank(world, division);
  });
}

// Two stages with a layer each.
TEST_P(MeshGradientsTest, AreThoseOfOneRankOverAPipeline) {
  const auto divisions = divisions_of(kRanks, 2);
  ASSERT_EQ(divisions.size(), 12U);
  on_ranks(GetParam(), [&](Communicator& world) {
    for (const auto& division : divisions) expect_as_one_rank(world, division);
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MeshGradientsTest);
INSTANTIATE_TEST_SUITE_P(Ranks, MeshGradientsTest,
                         ::testing::ValuesIn(testing::rank_cases_of(kRanks)),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::mesh_gradients_test
