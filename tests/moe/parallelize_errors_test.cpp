#include <gtest/gtest.h>

#include <functional>

#include "support/errors.h"
#include "support/moe_blocks.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

using testing::apply;
using testing::block_of;
using testing::error_of;

// Four ranks, dp by ep; every rank gets the same error, and its blocks are as before.
void expect_error(const std::function<void(std::vector<MoeBlock*>&, Mesh&)>& change,
                  const std::string& expected) {
  run_ranks(4,
            [&](Communicator& world) {
              Mesh mesh(world, {{"dp", 2}, {"ep", 2}});
              MoeBlock first = block_of(8);
              MoeBlock second = block_of(6, "layers.4.mlp");
              std::vector<MoeBlock*> blocks{&first, &second};
              change(blocks, mesh);
              Communicator* group = second.group;
              EXPECT_EQ(error_of<InvalidArgument>([&] { apply_expert_parallel(blocks, &mesh); }),
                        expected);
              EXPECT_EQ(first.parameters.views().experts.size(), 8U);
              EXPECT_EQ(first.group, nullptr);
              EXPECT_EQ(second.group, group);
              world.barrier();
            },
            {.timeout = testing::kTestTimeout});
}

TEST(ParallelizeErrors, AreTheSameOnEveryRank) {
  const std::string at_2 = "apply_expert_parallel: rank 2: ";
  const auto on_rank_2 = [](const std::function<void(std::vector<MoeBlock*>&)>& change) {
    return [change](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
      if (mesh.world().rank() == 2) change(blocks);
    };
  };
  expect_error([](auto& blocks, Mesh& mesh) { apply(*blocks[1], &mesh); },
               "apply_expert_parallel: rank 0: layers.4.mlp is divided over 2 ranks already");
  expect_error(on_rank_2([](auto& blocks) { blocks[1] = nullptr; }), at_2 + "block 1 of 2 is null");
  expect_error(on_rank_2([](auto& blocks) { blocks.push_back(blocks[1]); }),
               at_2 + "layers.4.mlp is listed twice");
  expect_error(on_rank_2([](auto& blocks) { blocks[1]->placement = {}; }),
               at_2 + "the placement of layers.4.mlp has no experts");
  expect_error(on_rank_2([](auto& blocks) {
                 auto tensors = blocks[1]->parameters.views();
                 tensors.experts.resize(2);
                 blocks[1]->parameters = MoeParameters::of(tensors);
               }),
               at_2 +
                   "layers.4.mlp holds 2 of 6 experts: only a rank that holds all of them can "
                   "divide them");
  expect_error(on_rank_2([](auto& blocks) {
                 auto tensors = blocks[1]->parameters.views();
                 tensors.experts[1].down = {};
                 blocks[1]->parameters = MoeParameters::of(tensors);
               }),
               at_2 + "layers.4.mlp: local expert 1's down [8,6] is missing");
}

// Of ranks 2 and 3, which divide the layers between them.
TEST(ParallelizeErrors, NameWhatRanksDisagreeAbout) {
  expect_error(
      [](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
        if (mesh.world().rank() == 3) blocks.pop_back();
      },
      "apply_expert_parallel: rank 2: ranks disagree about the number of layers: rank 0 has 2, "
      "rank 1 has 1");
  expect_error(
      [](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
        if (mesh.world().rank() == 3) *blocks[1] = block_of(5);
      },
      "apply_expert_parallel: rank 2: ranks disagree about num_experts of layers.4.mlp: rank 0 "
      "has 6, rank 1 has 5");
  run_ranks(2, [](Communicator& world) {
    Mesh mesh(world, {{"ep", 2}, {"sp", 1}});
    MoeBlock block = block_of(4);
    const std::string axis = world.rank() == 0 ? "ep" : "sp";
    const auto error = error_of<InvalidArgument>([&] { apply(block, &mesh, {axis}); });
    EXPECT_EQ(error.substr(0, error.find(": rank")),
              "ranks disagree about the axes to divide over (their hash)");
  });
}

}  // namespace
}  // namespace switchyard
