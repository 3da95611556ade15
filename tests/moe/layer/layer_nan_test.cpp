// SPDX-License-Identifier: Apache-2.0
// A NaN reaches the results of its own token, and the gradients of that token's experts; nothing
// else. Picks and their weights are given: a router refuses tokens that are not finite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"
#include "switchyard/run_ranks.h"

namespace switchyard::layer_nan_test {
namespace {

using testing::Random;
using testing::same_bits;

constexpr int kRanks = 3;
constexpr int kHurtRank = 1;
constexpr std::int64_t kHurtToken = 2;
constexpr std::int64_t kTokens = 70;  // of each rank, more than a panel of an expert

enum class Where { nowhere, x, d_y, weights };

struct Results {
  Tensor y, d_x, d_weights, ids;
  MoeGradients gradients;
};

void put_nan(Tensor& tensor) {
  const auto row = tensor.view().slice(kHurtToken, kHurtToken + 1);
  if (tensor.dtype() == Dtype::f32) {
    row.span<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  } else {
    row.span<Bfloat16>()[1] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  }
}

bool has_nan(const ConstTensorView& view) {
  const auto elements = testing::doubles_of(view).values;
  return std::any_of(elements.begin(), elements.end(), [](double v) { return std::isnan(v); });
}

std::vector<Results> results_of(Where where, MoverKind mover, Dtype dtype) {
  std::vector<Results> results(kRanks);
  run_ranks(kRanks, [&](Communicator& comm) {
    auto options = testing::tiny_layer_options();
    options.mover = mover;
    options.dtype = dtype;
    const auto placement = ExpertPlacement::contiguous(6, kRanks);
    MoeLayer layer(comm, placement, options);
    const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
    Random random(static_cast<std::uint64_t>(comm.rank()) + 20);
    Results& result = results[static_cast<std::size_t>(comm.rank())];
    result.gradients = testing::gradients_for(weights);
    Tensor x = random.tensor({kTokens, options.hidden}, dtype);
    Tensor d_y = random.tensor({kTokens, options.hidden}, dtype);
    Tensor pick_weights = random.tensor({kTokens, options.router.top_k}, Dtype::f32);
    result.ids =
        random.expert_ids({.num_tokens = kTokens, .top_k = options.router.top_k, .num_experts = 6});
    if (comm.rank() == kHurtRank && where == Where::x) put_nan(x);
    if (comm.rank() == kHurtRank && where == Where::d_y) put_nan(d_y);
    if (comm.rank() == kHurtRank && where == Where::weights) put_nan(pick_weights);
    SavedForBackward saved;
    result.y = layer.forward(
        weights, {.x = x, .expert_ids = result.ids, .expert_weights = pick_weights}, saved);
    result.d_x = Tensor({kTokens, options.hidden}, dtype);
    result.d_weights = Tensor({kTokens, options.router.top_k}, Dtype::f32);
    layer.backward(
        weights, saved, d_y,
        {.d_x = result.d_x, .gradients = result.gradients, .d_weights = result.d_weights.view()});
  });
  return results;
}

void expect_unhurt(const ConstTensorView& actual, const ConstTensorView& plain, int rank,
                   const char* name) {
  for (std::int64_t t = 0; t < kTokens; ++t) {
    if (rank == kHurtRank && t == kHurtToken) continue;
    EXPECT_TRUE(same_bits(actual.slice(t, t + 1), plain.slice(t, t + 1)))
        << name << " of token " << t << " of rank " << rank;
  }
}

void expect_hurts_one_token(Where where, MoverKind mover, Dtype dtype) {
  const auto plain = results_of(Where::nowhere, mover, dtype);
  const auto hurt = results_of(where, mover, dtype);
  const auto own_ids = plain[kHurtRank].ids.view().slice(kHurtToken, kHurtToken + 1);
  const auto picked = own_ids.span<std::int32_t>();
  const std::set<int> picks(picked.begin(), picked.end());
  bool reached_gradients = false;
  for (int r = 0; r < kRanks; ++r) {
    const auto i = static_cast<std::size_t>(r);
    expect_unhurt(hurt[i].y, plain[i].y, r, "y");
    expect_unhurt(hurt[i].d_x, plain[i].d_x, r, "d_x");
    expect_unhurt(hurt[i].d_weights, plain[i].d_weights, r, "d_weights");
    const auto owned = ExpertPlacement::contiguous(6, kRanks);
    for (std::size_t e = 0; e < owned.experts_of(r).size(); ++e) {
      const auto& gradient = hurt[i].gradients.experts[e];
      if (picks.contains(owned.experts_of(r)[e])) {
        reached_gradients |= has_nan(gradient.up) || has_nan(gradient.down);
      } else {
        testing::expect_same_bits(gradient, plain[i].gradients.experts[e]);
      }
    }
  }
  const Results& own = hurt[kHurtRank];
  EXPECT_EQ(has_nan(own.y), where != Where::d_y);
  EXPECT_TRUE(has_nan(own.d_x));
  EXPECT_TRUE(reached_gradients);  // the NaN was there
}

class LayerNan : public ::testing::TestWithParam<MoverKind> {};

TEST_P(LayerNan, InATokenHurtsThatTokenAlone) {
  expect_hurts_one_token(Where::x, GetParam(), Dtype::f32);
  expect_hurts_one_token(Where::x, GetParam(), Dtype::bf16);
}
TEST_P(LayerNan, InAGradientHurtsThatTokenAlone) {
  expect_hurts_one_token(Where::d_y, GetParam(), Dtype::f32);
}
TEST_P(LayerNan, InARoutingWeightHurtsThatTokenAlone) {
  expect_hurts_one_token(Where::weights, GetParam(), Dtype::f32);
}

std::string name_of_mover(const ::testing::TestParamInfo<MoverKind>& info) {
  if (info.param == MoverKind::direct) return "direct";
  return info.param == MoverKind::packed ? "packed" : "peer";
}
INSTANTIATE_TEST_SUITE_P(Movers, LayerNan,
                         ::testing::Values(MoverKind::direct, MoverKind::packed, MoverKind::peer),
                         name_of_mover);

}  // namespace
}  // namespace switchyard::layer_nan_test
