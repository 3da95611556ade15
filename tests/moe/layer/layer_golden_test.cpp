// SPDX-License-Identifier: Apache-2.0
// Recorded cases that are the same at every number of ranks: through peer memory they have the bits
// of one rank, which are what was recorded.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/layer/layer_step.h"
#include "switchyard/convert.h"
#include "switchyard/run_ranks.h"
#include "switchyard/safetensors.h"

namespace switchyard::layer_golden_test {
namespace {

using testing::copy_of;
using testing::LayerResults;
using testing::near;
using testing::on_all;
using testing::Piece;
using testing::same_part;

struct GoldenCase {
  std::string name;
  RouterOptions router;
  std::int64_t shared_intermediate = 0;
};
void PrintTo(const GoldenCase& golden, std::ostream* out) { *out << golden.name; }

std::vector<GoldenCase> golden_cases() {
  auto olmoe = RouterOptions::mixtral(8, 3);
  olmoe.normalise = Normalise::none;
  auto deepseek = RouterOptions::deepseek_v3(16, 4);
  deepseek.num_expert_groups = 4;
  deepseek.kept_expert_groups = 2;
  deepseek.scale = 2.5F;
  return {{"hf_mixtral", RouterOptions::mixtral(8, 2)},
          {"hf_qwen3_moe", RouterOptions::mixtral(8, 4)},
          {"hf_olmoe", olmoe},
          {"hf_deepseek_v3", deepseek, 24}};
}

class Recorded {
 public:
  explicit Recorded(const GoldenCase& golden)
      : file_(SafetensorsFile::open(SWITCHYARD_GOLDEN "/" + golden.name + ".safetensors")),
        tensors_(file_.tensors()),
        options_{.hidden = 16,
                 .intermediate = 24,
                 .router = golden.router,
                 .shared_intermediate = golden.shared_intermediate},
        ids_(Router(golden.router)
                 .route(weights_of(ExpertPlacement::contiguous(num_experts(), 1), 0).router, x())
                 .expert_ids) {}

  ConstTensorView x() const { return file_.tensor("x"); }
  ConstTensorView y() const { return file_.tensor("y"); }
  ConstTensorView d_x() const { return file_.tensor("dx"); }
  int num_experts() const { return options_.router.num_experts; }

  // Returns a rank's tokens: rank 0 has none, and higher ranks have more.
  Piece piece_of(const Communicator& comm) const {
    const std::int64_t ranks = comm.size();
    const auto begin = [&](std::int64_t r) {
      return ranks == 1 ? r * x().rows() : x().rows() * r * (r - 1) / (ranks * (ranks - 1));
    };
    return {begin(comm.rank()), begin(comm.rank() + 1)};
  }

  LayerResults run(Communicator& comm, const ExpertPlacement& placement, MoverKind mover) const {
    auto options = options_;
    options.mover = mover;
    MoeLayer layer(comm, placement, options);
    const Piece piece = piece_of(comm);
    const auto part = [&](const ConstTensorView& whole) {
      return copy_of(whole.slice(piece.first, piece.last));
    };
    return testing::run_step(layer, weights_of(placement, comm.rank()),
                             {part(x()), part(file_.tensor("dy")), part(ids_)}, Biases::none);
  }

 private:
  MoeWeights weights_of(const ExpertPlacement& placement, int rank) const {
    auto weights = from_hugging_face(tensors_, "weight.", placement, rank);
    if (options_.router.score_bias != ScoreBias::none) {
      weights.router.score_bias = file_.tensor("buffer.gate.e_score_correction_bias");
    }
    return weights;
  }

  SafetensorsFile file_;
  NamedTensors tensors_;
  MoeLayerOptions options_;
  Tensor ids_;
};

class LayerGolden : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(LayerGolden, HasTheBitsOfOneRankThroughPeerMemory) {
  const Recorded recorded(GetParam());
  const int experts = recorded.num_experts();
  const auto alone = connect();
  const auto one =
      recorded.run(*alone, ExpertPlacement::contiguous(experts, 1), MoverKind::automatic);
  EXPECT_TRUE(near(one.y, recorded.y(), 1e-5));
  EXPECT_TRUE(near(one.d_x, recorded.d_x(), 1e-5));
  for (const int ranks : {3, 8}) {
    std::vector<std::int32_t> owners;  // in turns to all ranks but the last
    for (int e = 0; e < experts; ++e) owners.push_back(e % (ranks - 1));
    run_ranks(ranks, [&](Communicator& comm) {
      for (const auto& placement : {ExpertPlacement::contiguous(experts, ranks),
                                    ExpertPlacement::from_owners(owners, ranks)}) {
        const auto part = recorded.run(comm, placement, MoverKind::peer);
        EXPECT_TRUE(on_all(comm, same_part(part, recorded.piece_of(comm), one))) << ranks;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LayerGolden, ::testing::ValuesIn(golden_cases()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace switchyard::layer_golden_test
