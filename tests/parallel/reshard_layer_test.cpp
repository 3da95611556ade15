// SPDX-License-Identifier: Apache-2.0
// Layers whose experts have moved: the same weights elsewhere, and the same step to the bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "support/compare.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"
#include "switchyard/reshard.h"
#include "switchyard/run_ranks.h"

namespace switchyard::reshard_layer_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::error_of;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr int kExperts = 10;
constexpr std::uint64_t kSeed = 5;

// Places experts on the first `num_owners` ranks; the others own none.
ExpertPlacement even_over(int num_owners, int num_ranks) {
  const auto owners = ExpertPlacement::contiguous(kExperts, std::min(num_owners, num_ranks));
  return ExpertPlacement::from_owners({owners.owners().begin(), owners.owners().end()}, num_ranks);
}

std::vector<ExpertPlacement> placements_for(int num_ranks) {
  std::vector<ExpertPlacement> result;
  for (const int owners : {1, 2, 3, 8}) result.push_back(even_over(owners, num_ranks));
  std::vector<std::int32_t> odd;  // the last rank first, and one rank without experts
  for (int e = 0; e < kExperts; ++e) {
    const int turn = num_ranks - 1 - e % num_ranks;
    odd.push_back(num_ranks > 1 && turn == num_ranks / 2 ? 0 : turn);
  }
  result.push_back(ExpertPlacement::from_owners(odd, num_ranks));
  return result;
}

MoeLayerOptions layer_options() {
  return {.hidden = 24,
          .intermediate = 20,
          .router = RouterOptions::torchtitan(kExperts, 3),
          .shared_intermediate = 12};
}

struct Step {
  Tensor y, d_x;
  std::map<int, ExpertGradients> experts;  // this rank's, by id
};

Step run_step(Communicator& comm, const MoeParameters& parameters,
              const ExpertPlacement& placement) {
  const auto options = layer_options();
  MoeLayer layer(comm, placement, options);
  MoeParameters gradients(options, placement, comm.rank(), Biases::all);
  Random random(23);
  const Tensor x = random.tensor({700, options.hidden}, Dtype::f32);
  const Tensor d_y = random.tensor({700, options.hidden}, Dtype::f32);
  const auto piece = awkward_piece(comm, 700);
  SavedForBackward saved;
  Step step;
  step.y = layer.forward(parameters.weights(), {.x = piece.of(x)}, saved);
  step.d_x = Tensor(step.y.shape(), Dtype::f32);
  auto views = gradients.views();
  views.router.score_bias = {};
  layer.backward(parameters.weights(), saved, piece.of(d_y), {.d_x = step.d_x, .gradients = views});
  const auto ids = placement.experts_of(comm.rank());
  for (std::size_t i = 0; i < ids.size(); ++i) step.experts[ids[i]] = views.experts[i];
  return step;
}

// Gradients of all experts, gathered on every rank [E, 2I + …], in the order of ids.
std::vector<Tensor> gather_experts(Communicator& comm, const ExpertPlacement& placement,
                                   const Step& step) {
  MoeViews tensors;
  for (const auto& [id, gradients] : step.experts) tensors.experts.push_back(gradients);
  std::vector<Tensor> all;
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<std::int32_t> owners(kExperts, root);
    const auto to = ExpertPlacement::from_owners(owners, comm.size());
    const auto whole = reshard(MoeParameters::of(tensors), placement, to, comm);
    if (root != comm.rank()) continue;
    for (const auto& expert : whole.weights().experts) {
      for (const auto& [name, view] : testing::named_tensors(expert)) all.push_back(copy_of(view));
    }
  }
  return all;
}

class ReshardLayerTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(ReshardLayerTest, AStepHasTheSameBitsWhereverTheExpertsWent) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto from = even_over(4, comm.size());
    const auto parameters =
        MoeParameters::random(layer_options(), from, comm.rank(), kSeed, Biases::all);
    const Step before = run_step(comm, parameters, from);
    const auto gradients = gather_experts(comm, from, before);
    for (const auto& to : placements_for(comm.size())) {
      const auto moved = reshard(parameters, from, to, comm);
      const Step after = run_step(comm, moved, to);
      EXPECT_TRUE(same_bits(after.y, before.y));
      EXPECT_TRUE(same_bits(after.d_x, before.d_x));
      const auto gathered = gather_experts(comm, to, after);
      ASSERT_EQ(gathered.size(), gradients.size());
      for (std::size_t i = 0; i < gathered.size(); ++i) {
        EXPECT_TRUE(same_bits(gathered[i], gradients[i]));
      }
    }
  });
}

// There and back, through every placement, by what an expert's values depend on: its id.
TEST_P(ReshardLayerTest, ParametersOfEveryKindArriveWhole) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const auto activation : {Activation::swiglu, Activation::relu}) {
      for (const auto biases : {Biases::none, Biases::all}) {
        auto options = layer_options();
        options.activation = activation;
        options.dtype = biases == Biases::all ? Dtype::bf16 : Dtype::f32;
        auto at = even_over(4, comm.size());
        auto parameters = MoeParameters::random(options, at, comm.rank(), kSeed, biases);
        const auto* gate = parameters.views().router.gate.data();
        auto stops = placements_for(comm.size());
        stops.push_back(at);
        for (const auto& to : stops) {
          parameters = reshard(parameters, at, to, comm);
          at = to;
          const auto expected = MoeParameters::random(options, to, comm.rank(), kSeed, biases);
          const auto& views = parameters.weights();
          ASSERT_EQ(views.experts.size(), expected.weights().experts.size());
          for (std::size_t i = 0; i < views.experts.size(); ++i) {
            testing::expect_same_bits(views.experts[i], expected.weights().experts[i]);
          }
          EXPECT_EQ(views.router.gate.data(), gate);
          testing::expect_same_bits(views.shared, expected.weights().shared);
        }
      }
    }
  });
}

// Experts that lie apart, not packed, and matrices whose rows do.
TEST_P(ReshardLayerTest, TakesStridedAndSeparateExperts) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto options = layer_options();
    const auto from = even_over(4, comm.size());
    const auto to = placements_for(comm.size()).back();
    auto tensors = MoeParameters::random(options, from, comm.rank(), kSeed).views();
    for (auto& expert : tensors.experts) {
      Tensor wide({expert.up.rows(), 2 * expert.up.shape()[1]}, Dtype::f32);
      const TensorView apart(wide.data(), Dtype::f32, expert.up.shape(), wide.shape()[1],
                             wide.view().owner());
      for (std::int64_t r = 0; r < apart.rows(); ++r) {
        std::copy_n(expert.up.row(r), apart.row_bytes(), apart.row(r));
      }
      expert.up = apart;
    }
    const auto moved = reshard(MoeParameters::of(tensors), from, to, comm);
    const auto expected = MoeParameters::random(options, to, comm.rank(), kSeed);
    for (std::size_t i = 0; i < expected.weights().experts.size(); ++i) {
      testing::expect_same_bits(moved.weights().experts[i], expected.weights().experts[i]);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReshardLayerTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

// Rank 1 of three changes its tensors; every rank gets the same error.
void expect_error(const std::function<void(MoeViews&)>& change, const std::string& expected) {
  const auto placement = ExpertPlacement::from_owners({1, 1, 2, 2, 2, 2}, 3);  // rank 0 has none
  run_ranks(3, [&](Communicator& comm) {
    auto tensors =
        MoeParameters(testing::tiny_layer_options(), placement, comm.rank(), Biases::all).views();
    if (comm.rank() == 1) change(tensors);
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { (void)reshard(MoeParameters::of(tensors), placement, placement, comm); }),
              expected);
    comm.barrier();
  });
}

TEST(ReshardLayerErrors, AreTheSameOnEveryRank) {
  expect_error([](MoeViews& t) { t.experts.pop_back(); },
               "reshard: rank 1: there are 1 experts, but this rank has 2");
  expect_error([](MoeViews& t) { t.experts[0].up = {}; },
               "reshard: rank 1: local expert 0's up is [0], but must be [I,H]");
  expect_error([](MoeViews& t) { t.experts[1].down = {}; },
               "reshard: rank 1: local expert 1's down [6,4] is missing");
  expect_error(
      [](MoeViews& t) {
        t.experts[1].up = Tensor({4, 7}, Dtype::f32);
      },
      "reshard: rank 1: local expert 1's up is f32 [4,7], but must be [4,6] of f32 or "
      "bf16");
  expect_error(
      [](MoeViews& t) {
        t.experts[1].gate = Tensor({4, 6}, Dtype::bf16);
      },
      "reshard: rank 1: local expert 1's gate is bf16, but others of its kind are f32");
  expect_error([](MoeViews& t) { t.experts[0].up_bias = {}; },
               "reshard: rank 1: local expert 0's gate_bias is given, but others of its kind are "
               "not");
}

// Rank 0 has no experts, and is not asked.
TEST(ReshardLayerErrors, NameWhatRanksDisagreeAbout) {
  expect_error(
      [](MoeViews& t) {
        for (auto& expert : t.experts) expert.down_bias = {};
      },
      "reshard: ranks disagree about the dtype of down_bias: rank 1 has -1, rank 2 has 0");
  expect_error(
      [](MoeViews& t) {
        for (auto& expert : t.experts) expert.gate = expert.gate_bias = {};
      },
      "reshard: ranks disagree about whether experts have gates: rank 1 has 0, rank 2 has 1");
}

}  // namespace
}  // namespace switchyard::reshard_layer_test
