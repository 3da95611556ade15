// The promise of the layer: however the sequence is cut over ranks, whatever the number of threads
// and however rows travel, the bits are those of one rank on one thread.
#include <gtest/gtest.h>

#include <map>

#include "support/compare.h"
#include "support/cut.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/moe_layer.h"

namespace switchyard {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::movers_of;
using testing::on_all;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 3;  // with two, swapped terms would give the same sum

enum class Mutation { none, reversed_ranks, swapped_k };

// The global sequence, and picks that send hundreds of rows to some experts and few to others.
struct Problem {
  explicit Problem(const MoeLayerOptions& layer_options) : options(layer_options) {
    Random random(23);
    x = random.tensor({num_tokens, options.hidden}, options.dtype);
    d_y = random.tensor({num_tokens, options.hidden}, options.dtype);
    ids = random.expert_ids({num_tokens, kTopK, kExperts, 0.5});
  }

  MoeLayerOptions options;
  std::int64_t num_tokens = 700;
  Tensor x, d_y, ids;
};

MoeLayerOptions small_layer() {
  return {.hidden = 48,
          .intermediate = 40,
          .router = RouterOptions::mixtral(kExperts, kTopK),
          .shared_intermediate = 24};
}

struct Results {
  Tensor y, d_x, d_weights;
  std::map<int, ExpertGradients> experts;  // by id
};

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
  const MoeParameters gradients(options, placement, ranks.rank(), Biases::all);

  const auto piece = awkward_piece(comm, problem.num_tokens);
  const Tensor x = copy_of(piece.of(problem.x));
  const Tensor ids = way.mutation == Mutation::swapped_k ? swap_k(piece.of(problem.ids))
                                                         : copy_of(piece.of(problem.ids));
  SavedForBackward saved;
  Results results;
  results.y = layer.forward(parameters.weights(), {.x = x, .expert_ids = ids}, saved);
  results.d_x = Tensor(x.shape(), x.dtype());
  results.d_weights = Tensor(ids.shape(), Dtype::f32);
  const Tensor d_y = copy_of(piece.of(problem.d_y));
  layer.backward(
      parameters.weights(), saved, d_y,
      {.d_x = results.d_x, .gradients = gradients.views(), .d_weights = results.d_weights});
  const auto mine = placement.experts_of(ranks.rank());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    results.experts[mine[i]] = gradients.views().experts[i];
  }
  return results;
}

Results run_alone(const Problem& problem) {
  const auto alone = connect();
  return run_step(*alone, problem, problem.options);
}

bool same_expert(const ExpertGradients& a, const ExpertGradients& b) {
  return same_bits(copy_of(a.gate), copy_of(b.gate)) && same_bits(copy_of(a.up), copy_of(b.up)) &&
         same_bits(copy_of(a.down), copy_of(b.down)) && same_bits(a.up_bias, b.up_bias) &&
         same_bits(a.gate_bias, b.gate_bias) && same_bits(a.down_bias, b.down_bias);
}

bool same_as_alone(Communicator& comm, const Problem& problem, const Results& one,
                   const MoeLayerOptions& options, const Way& way = {}) {
  const Results many = run_step(comm, problem, options, way);
  const auto piece = awkward_piece(comm, problem.num_tokens);
  bool equal = same_bits(many.y, piece.of(one.y)) && same_bits(many.d_x, piece.of(one.d_x)) &&
               same_bits(many.d_weights, piece.of(one.d_weights));
  for (const auto& [expert, gradients] : many.experts) {
    equal = equal && same_expert(gradients, one.experts.at(expert));
  }
  return on_all(comm, equal);
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

TEST_P(LayerBitwiseTest, InBf16) {
  auto options = small_layer();
  options.dtype = Dtype::bf16;
  expect_same(options);
}

TEST_P(LayerBitwiseTest, AtSizesThatTheMatrixLibraryBlocks) {
  auto options = small_layer();
  options.hidden = 520;
  options.intermediate = 72;
  expect_same(options);
}

TEST_P(LayerBitwiseTest, WhereverTheWeightEnters) {
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
    options.router.num_groups = 3;
    options.router.kept_groups = 2;
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

// What makes the tests above worth something.
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
}  // namespace switchyard
