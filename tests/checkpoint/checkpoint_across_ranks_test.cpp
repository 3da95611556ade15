// SPDX-License-Identifier: Apache-2.0
// A checkpoint of four ranks, loaded by any other number of them: the weights, what an optimizer
// keeps, and the next step have the same bits.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/layer_step.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "support/shared_folder.h"
#include "switchyard/checkpoint.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace switchyard::checkpoint_across_ranks_test {
namespace {

namespace fs = std::filesystem;
using testing::awkward_piece;
using testing::LayerProblem;
using testing::LayerResults;
using testing::on_all;
using testing::on_ranks;
using testing::same_bits;

constexpr int kSavers = 4;
constexpr std::uint64_t kSeed = 5;
constexpr std::uint64_t kMomentSeed = 6;
constexpr std::uint64_t kVarianceSeed = 7;

using MakePlacement = ExpertPlacement (*)(int num_experts, int num_ranks);

// Neither in order nor even: some ranks have many experts, and some none.
ExpertPlacement odd_placement(int num_experts, int num_ranks) {
  std::vector<std::int32_t> owners;
  for (int e = 0; e < num_experts; ++e) owners.push_back(num_ranks - 1 - e * e % num_ranks);
  return ExpertPlacement::from_owners(owners, num_ranks);
}

MoeLayerOptions layer_of(int num_experts) {
  MoeLayerOptions options{.hidden = 24,
                          .intermediate = 20,
                          .router = RouterOptions::mixtral(num_experts, 3),
                          .shared_intermediate = 12};
  options.router.score_bias = ScoreBias::choice;
  return options;
}

MoeParameters parameters_of(const MoeLayerOptions& options, const ExpertPlacement& placement,
                            int rank, std::uint64_t seed) {
  auto parameters = MoeParameters::random(options, placement, rank, seed, Biases::all);
  const auto bias = parameters.views().router.score_bias.span<float>();
  for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1F * static_cast<float>(e);
  return parameters;
}

MoeLayerOptions optimizer_options(MoeLayerOptions options) {
  options.dtype = Dtype::f32;
  options.router.score_bias = ScoreBias::none;
  return options;
}

void save_part(Communicator& comm, const fs::path& path, const MoeLayerOptions& options,
               const ExpertPlacement& placement, CheckpointForm form) {
  const auto kept = optimizer_options(options);
  const int rank = comm.rank();
  const auto moments = MoeParameters::random(kept, placement, rank, kMomentSeed, Biases::all);
  const auto variances = MoeParameters::random(kept, placement, rank, kVarianceSeed, Biases::all);
  const auto weights = parameters_of(options, placement, rank, kSeed);
  const CheckpointContents contents{
      .blocks = {{"layers.0.mlp.", weights.weights(), placement, rank},
                 {"optimizer.m.layers.0.mlp.", moments.weights(), placement, rank},
                 {"optimizer.v.layers.0.mlp.", variances.weights(), placement, rank}}};
  save_checkpoint(comm, path, contents, form);
}

void expect_same_parameters(const MoeParameters& actual, const MoeParameters& expected) {
  const auto& a = actual.weights();
  const auto& e = expected.weights();
  EXPECT_TRUE(same_bits(a.router.gate, e.router.gate));
  EXPECT_TRUE(same_bits(a.router.gate_bias, e.router.gate_bias));
  EXPECT_TRUE(same_bits(a.router.score_bias, e.router.score_bias));
  ASSERT_EQ(a.experts.size(), e.experts.size());
  for (std::size_t i = 0; i < a.experts.size(); ++i) {
    testing::expect_same_bits(a.experts[i], e.experts[i]);
  }
  testing::expect_same_bits(a.shared, e.shared);
}

LayerResults run_step(Communicator& comm, const LayerProblem& problem,
                      const ExpertPlacement& placement, const MoeParameters& parameters) {
  MoeLayer layer(comm, placement, problem.options);
  const auto piece = awkward_piece(comm, problem.num_tokens);
  return testing::run_step(layer, parameters.weights(), input_of(problem, piece), Biases::all);
}

LayerResults run_alone(const LayerProblem& problem) {
  const auto alone = connect();
  const auto placement = ExpertPlacement::contiguous(problem.options.router.num_experts, 1);
  return run_step(*alone, problem, placement, parameters_of(problem.options, placement, 0, kSeed));
}

void expect_loaded(Communicator& comm, const Checkpoint& checkpoint, const LayerProblem& problem,
                   const ExpertPlacement& placement, const LayerResults& one) {
  const auto& options = problem.options;
  MoeParameters loaded(options, placement, comm.rank(), Biases::all);
  load_block(checkpoint, "layers.0.mlp.", placement, comm.rank(), loaded.views());
  expect_same_parameters(loaded, parameters_of(options, placement, comm.rank(), kSeed));
  const auto many = run_step(comm, problem, placement, loaded);
  EXPECT_TRUE(on_all(comm, same_part(many, awkward_piece(comm, problem.num_tokens), one)));

  const auto kept = optimizer_options(options);
  for (const auto& [prefix, seed] :
       {std::pair("optimizer.m.", kMomentSeed), std::pair("optimizer.v.", kVarianceSeed)}) {
    MoeParameters state(kept, placement, comm.rank(), Biases::all);
    load_block(checkpoint, std::string(prefix) + "layers.0.mlp.", placement, comm.rank(),
               state.views());
    expect_same_parameters(state,
                           MoeParameters::random(kept, placement, comm.rank(), seed, Biases::all));
  }
}

class CheckpointAcrossRanksTest : public ::testing::TestWithParam<testing::RankCase> {
 protected:
  static void expect_same(const MoeLayerOptions& options, MakePlacement saved_as,
                          MakePlacement loaded_as) {
    const LayerProblem problem(options);
    const auto one = run_alone(problem);
    const int num_experts = options.router.num_experts;
    testing::SharedFolder folder;
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto path = folder.path(comm) / "model";
      for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
        if (comm.rank() == 0) {
          fs::remove_all(path);
          run_ranks(kSavers, [&](Communicator& saver) {
            save_part(saver, path, options, saved_as(num_experts, kSavers), form);
          });
        }
        comm.barrier();
        expect_loaded(comm, Checkpoint::open(path), problem, loaded_as(num_experts, comm.size()),
                      one);
        comm.barrier();
      }
    });
  }
};

TEST_P(CheckpointAcrossRanksTest, TheNextStepIsTheSame) {
  expect_same(layer_of(8), ExpertPlacement::contiguous, ExpertPlacement::contiguous);
}

TEST_P(CheckpointAcrossRanksTest, TheNextStepIsTheSameInBf16) {
  auto options = layer_of(8);
  options.dtype = Dtype::bf16;
  expect_same(options, ExpertPlacement::contiguous, ExpertPlacement::contiguous);
}

TEST_P(CheckpointAcrossRanksTest, TheNextStepIsTheSameWithUnevenExperts) {
  expect_same(layer_of(10), ExpertPlacement::contiguous, ExpertPlacement::contiguous);
}

TEST_P(CheckpointAcrossRanksTest, TheNextStepIsTheSameForAnyPlacements) {
  expect_same(layer_of(10), odd_placement, ExpertPlacement::contiguous);
  expect_same(layer_of(10), ExpertPlacement::contiguous, odd_placement);
}

TEST_P(CheckpointAcrossRanksTest, TheNextStepIsTheSameWithoutGates) {
  auto options = layer_of(8);
  options.activation = Activation::gelu;
  options.shared_activation = Activation::relu;
  expect_same(options, ExpertPlacement::contiguous, odd_placement);
}

// The other way round: any number saves, and one loads.
TEST_P(CheckpointAcrossRanksTest, OneRankLoadsWhatManyRanksSaved) {
  const LayerProblem problem(layer_of(10));
  const auto one = run_alone(problem);
  testing::SharedFolder folder;
  on_ranks(GetParam(), [&](Communicator& comm) {
    for (const auto form : {CheckpointForm::one_file, CheckpointForm::file_per_rank}) {
      for (const MakePlacement make : {odd_placement, ExpertPlacement::contiguous}) {
        const auto path =
            folder.path(comm) / (form == CheckpointForm::one_file ? "file" : "folder");
        save_part(comm, path, problem.options, make(10, comm.size()), form);
        if (comm.rank() == 0) {
          const auto alone = connect();
          expect_loaded(*alone, Checkpoint::open(path), problem, ExpertPlacement::contiguous(10, 1),
                        one);
        }
        comm.barrier();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointAcrossRanksTest,
                         ::testing::ValuesIn(testing::rank_cases()), testing::rank_case_name);

}  // namespace
}  // namespace switchyard::checkpoint_across_ranks_test
