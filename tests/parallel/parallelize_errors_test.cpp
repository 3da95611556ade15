// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "support/checkpoint/moe_blocks.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::parallelize_errors_test {
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
              Communicator* comm = second.comm;
              EXPECT_EQ(error_of<InvalidArgument>([&] { apply_expert_parallel(blocks, &mesh); }),
                        expected);
              EXPECT_EQ(first.parameters.views().experts.size(), 8U);
              EXPECT_EQ(first.comm, nullptr);
              EXPECT_EQ(second.comm, comm);
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
               "apply_expert_parallel: rank 0: layers.4.mlp is already divided over 2 ranks");
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

const std::string kForm =
    "gate f32 [6,8], up f32 [6,8], down f32 [8,6], gate_bias f32 [6], up_bias f32 [6], down_bias "
    "f32 [8]";

std::string both(const std::string& what, const std::string& rank_2, const std::string& rank_3) {
  return "apply_expert_parallel: ranks disagree about " + what + ": rank 2 has " + rank_2 +
         ", rank 3 has " + rank_3;
}

// Ranks 2 and 3 disagree; they divide the layers between them.
TEST(ParallelizeErrors, NameWhatRanksDisagreeAbout) {
  expect_error(
      [](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
        if (mesh.world().rank() == 3) blocks.pop_back();
      },
      "apply_expert_parallel: ranks disagree about the number of layers: rank 2 has 2, rank 3 "
      "has 1");
  expect_error(
      [](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
        if (mesh.world().rank() == 3) *blocks[1] = block_of(5, "layers.4.mlp");
      },
      both("layer 1", "layers.4.mlp, 6 experts: " + kForm, "layers.4.mlp, 5 experts: " + kForm));
  expect_error(
      [](std::vector<MoeBlock*>& blocks, Mesh& mesh) {
        auto tensors = blocks[1]->parameters.views();
        if (mesh.world().rank() == 3) tensors.experts[0].down_bias = {};
        for (auto& expert : tensors.experts) expert.down_bias = tensors.experts[0].down_bias;
        blocks[1]->parameters = MoeParameters::of(tensors);
      },
      both("layer 1", "layers.4.mlp, 6 experts: " + kForm,
           "layers.4.mlp, 6 experts: " + kForm.substr(0, kForm.rfind(','))));
}

// As many layers with as many experts, in another order: each would be given the other's experts.
TEST(ParallelizeErrors, NameTheFirstLayerOfAnotherOrder) {
  run_ranks(2,
            [](Communicator& world) {
              Mesh mesh(world, {{"ep", 2}});
              MoeBlock a = block_of(4, "a");
              MoeBlock b = block_of(4, "b");
              std::vector<MoeBlock*> blocks{&a, &b};
              if (world.rank() == 1) std::swap(blocks[0], blocks[1]);
              const auto error =
                  error_of<InvalidArgument>([&] { apply_expert_parallel(blocks, &mesh); });
              EXPECT_EQ(error,
                        "apply_expert_parallel: ranks disagree about layer 0: rank 0 has a, "
                        "4 experts: " +
                            kForm + ", rank 1 has b, 4 experts: " + kForm);
              EXPECT_EQ(a.comm, nullptr);
            },
            {.timeout = testing::kTestTimeout});
}

TEST(ParallelizeErrors, NameTheAxisThatRanksDisagreeAbout) {
  run_ranks(2, [](Communicator& world) {
    Mesh mesh(world, {{"ep", 2}, {"sp", 1}});
    MoeBlock block = block_of(4);
    const auto with = [&](const std::vector<std::string>& axes) {
      return error_of<InvalidArgument>([&] { apply(block, &mesh, axes); });
    };
    const std::string axis = world.rank() == 0 ? "ep" : "sp";
    EXPECT_EQ(
        with({axis}),
        "apply_expert_parallel: ranks disagree about axis to divide over, number 0: rank 0 has ep, "
        "rank 1 has sp");
    EXPECT_EQ(with({"ep", axis}),
              "apply_expert_parallel: ranks disagree about the number of axes to divide over: "
              "rank 0 has 1, rank 1 has 2");
  });
}

}  // namespace
}  // namespace switchyard::parallelize_errors_test
