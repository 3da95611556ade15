// SPDX-License-Identifier: Apache-2.0
// The promise of the layer: however the sequence is cut over ranks, whatever the number of threads
// and however rows travel, the bits are those of one rank on one thread.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/layer_step.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/moe_layer.h"

namespace switchyard::layer_bitwise_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::movers_of;
using testing::on_all;
using testing::on_ranks;
using testing::RankCase;
using testing::same_bits;
using Problem = testing::LayerProblem;
using Results = testing::LayerResults;

constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 3;  // with two, swapped terms would give the same sum

enum class Mutation { none, reversed_ranks, swapped_k };

MoeLayerOptions small_layer() {
  return {.hidden = 48,
          .intermediate = 40,
          .router = RouterOptions::mixtral(kExperts, kTopK),
          .shared_intermediate = 24};
}

Tensor swap_k(const ConstTensorView& table) {
  Tensor result = copy_of(table);
  const auto ids = result.span<std::int32_t>();
  for (std::size_t i = 0; i < ids.size(); i += kTopK) std::swap(ids[i], ids[i + kTopK - 1]);
  return result;
}

// How one run differs from another; none of it may show in the bits.
struct Way {
  int threads = 1;
  MoverKind mover = MoverKind::automatic;
  Mutation mutation = Mutation::none;
};

Results run_step(Communicator& comm, const Problem& problem, MoeLayerOptions options,
                 const Way& way = {}) {
  // Reversed, rank r gets the tokens that rank r had, but calls itself another rank.
  const auto reversed = comm.split(0, -comm.rank());
  Communicator& ranks = way.mutation == Mutation::reversed_ranks ? *reversed : comm;
  const auto placement = ExpertPlacement::contiguous(kExperts, comm.size());
  options.mover = way.mover;
  MoeLayer layer(ranks, placement, options, Device::cpu({.num_threads = way.threads}));
  const auto parameters = MoeParameters::random(options, placement, ranks.rank(), 5, Biases::all);
  auto in = input_of(problem, awkward_piece(comm, problem.num_tokens));
  if (way.mutation == Mutation::swapped_k) in.ids = swap_k(in.ids);
  return testing::run_step(layer, parameters.weights(), in, Biases::all);
}

Results run_alone(const Problem& problem) {
  const auto alone = connect();
  return run_step(*alone, problem, problem.options);
}

bool same_as_alone(Communicator& comm, const Problem& problem, const Results& one,
                   const MoeLayerOptions& options, const Way& way = {}) {
  const Results many = run_step(comm, problem, options, way);
  return on_all(comm, same_part(many, awkward_piece(comm, problem.num_tokens), one));
}

class LayerBitwiseTest : public ::testing::TestWithParam<RankCase> {
 protected:
  // Everything that must not matter, on this number of ranks.
  void expect_same(const MoeLayerOptions& options) {
    const Problem problem(options);
    const Results one = run_alone(problem);
    on_ranks(GetParam(), [&](Communicator& comm) {
      for (const MoverKind mover : movers_of(comm)) {
        for (const int threads : {1, 2, 4}) {
          EXPECT_TRUE(same_as_alone(comm, problem, one, options, {threads, mover}))
              << threads << " threads a rank, mover " << static_cast<int>(mover);
        }
      }
    });
  }
};

TEST_P(LayerBitwiseTest, AnyNumberOfRanksAndThreadsEqualsOne) { expect_same(small_layer()); }

TEST_P(LayerBitwiseTest, AnyNumberOfRanksEqualsOneInBf16) {
  auto options = small_layer();
  options.dtype = Dtype::bf16;
  expect_same(options);
}

TEST_P(LayerBitwiseTest, AnyNumberOfRanksEqualsOneAtBlockedSizes) {
  auto options = small_layer();
  options.hidden = 520;
  options.intermediate = 72;
  expect_same(options);
}

TEST_P(LayerBitwiseTest, AnyNumberOfRanksEqualsOneAtEveryWeightStage) {
  for (const WeightStage stage : {WeightStage::activation, WeightStage::input}) {
    auto options = small_layer();
    options.weight_stage = stage;
    options.activation = Activation::clamped_swiglu;
    expect_same(options);
  }
}

TEST_P(LayerBitwiseTest, SizingAlignmentAndWhatIsKeptChangeNothing) {
  const Problem problem(small_layer());
  const Results one = run_alone(problem);
  on_ranks(GetParam(), [&](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      for (const Keep keep : {Keep::rows, Keep::activations, Keep::nothing}) {
        auto options = small_layer();
        options.keep = keep;
        EXPECT_TRUE(same_as_alone(comm, problem, one, options, {2, mover}));
        options.alignment = 128;
        EXPECT_TRUE(same_as_alone(comm, problem, one, options, {2, mover}));
        options.sizing = Sizing::bounded(128 * 30);
        EXPECT_TRUE(same_as_alone(comm, problem, one, options, {2, mover}));
        options.alignment = 1;
        EXPECT_TRUE(same_as_alone(comm, problem, one, options, {2, mover}));
      }
    }
  });
}

// The router's own picks, with no replay: they too are a function of the token alone.
TEST_P(LayerBitwiseTest, PicksDoNotDependOnTheCut) {
  for (const std::int64_t hidden : {17, 520}) {
    auto options = small_layer();
    options.hidden = hidden;
    options.router = RouterOptions::deepseek_v3(kExperts, kTopK);
    options.router.num_expert_groups = 3;
    options.router.kept_expert_groups = 2;
    const Problem problem(options);
    const auto pick = [&](Communicator& comm) {
      const auto placement = ExpertPlacement::contiguous(kExperts, comm.size());
      const auto parameters = MoeParameters::random(options, placement, comm.rank(), 5);
      const Tensor x = copy_of(awkward_piece(comm, problem.num_tokens).of(problem.x));
      return Router(options.router).route(parameters.weights().router, x);
    };
    const Routing one = pick(*connect());
    on_ranks(GetParam(), [&](Communicator& comm) {
      const Routing many = pick(comm);
      const auto piece = awkward_piece(comm, problem.num_tokens);
      EXPECT_TRUE(same_bits(many.expert_ids, piece.of(one.expert_ids)));
      EXPECT_TRUE(same_bits(many.weights, piece.of(one.weights)));
    });
  }
}

// Shows that the tests above can fail.
TEST_P(LayerBitwiseTest, MutationsAreNoticed) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    auto options = small_layer();
    options.dtype = dtype;
    const Problem problem(options);
    const Results one = run_alone(problem);
    on_ranks(GetParam(), [&](Communicator& comm) {
      EXPECT_FALSE(same_as_alone(comm, problem, one, options, {.mutation = Mutation::swapped_k}));
      if (comm.size() == 1) return;
      EXPECT_FALSE(
          same_as_alone(comm, problem, one, options, {.mutation = Mutation::reversed_ranks}));
      auto pre_reduced = options;
      pre_reduced.combine = CombineMode::pre_reduced;
      EXPECT_FALSE(same_as_alone(comm, problem, one, pre_reduced, {.mover = MoverKind::packed}));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, LayerBitwiseTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::layer_bitwise_test
