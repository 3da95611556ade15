// SPDX-License-Identifier: Apache-2.0
#include "switchyard/parallelize.h"

#include <gtest/gtest.h>

#include <memory>

#include "support/checkpoint/moe_blocks.h"
#include "support/compare.h"
#include "support/layer/moe_tensors.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace switchyard::parallelize_test {
namespace {

using testing::apply;
using testing::block_of;
using testing::on_ranks;
using testing::options_with;
using testing::RankCase;
using testing::same_bits;

// Each of them in memory of its own.
MoeViews apart(const MoeViews& tensors) {
  MoeViews result = tensors;
  for (auto& e : result.experts) {
    for (auto* view : {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias}) {
      *view = testing::copy_of(*view);
    }
  }
  return result;
}

void expect_divided(const MoeBlock& block, int num_experts, Communicator& comm) {
  EXPECT_EQ(block.comm->size(), comm.size());
  EXPECT_EQ(block.rank(), comm.rank());
  EXPECT_EQ(block.placement, ExpertPlacement::contiguous(num_experts, comm.size()));
  const auto expected = MoeParameters::random(options_with(num_experts), block.placement,
                                              comm.rank(), testing::kBlockSeed, Biases::all);
  const auto& views = block.parameters.weights();
  const auto& wanted = expected.weights();
  EXPECT_TRUE(same_bits(views.router.gate, wanted.router.gate));
  EXPECT_TRUE(same_bits(views.router.gate_bias, wanted.router.gate_bias));
  EXPECT_TRUE(same_bits(views.router.score_bias, wanted.router.score_bias));
  testing::expect_same_bits(views.shared, wanted.shared);
  ASSERT_EQ(views.experts.size(), wanted.experts.size());
  for (std::size_t i = 0; i < wanted.experts.size(); ++i) {
    testing::expect_same_bits(views.experts[i], wanted.experts[i]);
  }
}

class ParallelizeTest : public ::testing::TestWithParam<RankCase> {};

// Ten experts divide unevenly, two leave ranks without any.
TEST_P(ParallelizeTest, PackedExpertsAreSlicedAndTheirMemoryFreed) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    for (const int num_experts : {10, 2}) {
      MoeBlock block = block_of(num_experts);
      const std::weak_ptr<std::byte> packed = block.parameters.views().experts[0].up.owner();
      const auto* gate = block.parameters.views().router.gate.data();
      EXPECT_EQ(apply(block, &mesh), world.size() > 1 ? 1 : 0);
      EXPECT_EQ(packed.expired(), world.size() > 1);
      EXPECT_EQ(block.parameters.views().router.gate.data(), gate);
      expect_divided(block, num_experts, world);
    }
  });
}

TEST_P(ParallelizeTest, SeparateExpertsArePrunedWhereTheyLie) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    MoeBlock block = block_of(10);
    block.parameters = MoeParameters::of(apart(block.parameters.views()));
    std::vector<std::weak_ptr<std::byte>> owners;
    std::vector<const std::byte*> downs;
    for (const auto& expert : block.parameters.views().experts) {
      owners.emplace_back(expert.down.owner());
      downs.push_back(expert.down.data());
    }
    apply(block, &mesh);
    expect_divided(block, 10, world);
    std::size_t local = 0;
    for (int e = 0; e < 10; ++e) {
      const auto at = static_cast<std::size_t>(e);
      const bool kept = block.placement.owner(e) == world.rank();
      EXPECT_EQ(owners[at].expired(), !kept);
      if (!kept) continue;
      EXPECT_EQ(block.parameters.views().experts[local++].down.data(), downs[at]);
    }
  });
}

// One allocation for everything, the router included.
TEST_P(ParallelizeTest, WhatSharesMemoryWithExpertsThatGoIsCopied) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    MoeBlock block = block_of(10);
    std::weak_ptr<std::byte> flat;
    {
      MoeViews tensors = apart(block.parameters.views());
      Tensor memory({10000}, Dtype::f32);
      flat = memory.view().owner();
      std::byte* at = memory.data();
      const auto place = [&](TensorView& view) {
        const Tensor copy = testing::copy_of(view);
        std::copy_n(copy.data(), copy.bytes(), at);
        view = {at, view.dtype(), view.shape(), view.shape().row_elements(), memory.view().owner()};
        at += view.bytes();
      };
      place(tensors.router.gate);
      place(tensors.shared.up);
      for (auto& e : tensors.experts) {
        for (auto* view : {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias}) {
          place(*view);
        }
      }
      ASSERT_LE(at, memory.data() + memory.bytes());
      block.parameters = MoeParameters::of(tensors);
    }
    apply(block, &mesh);
    EXPECT_EQ(flat.expired(), world.size() > 1);
    expect_divided(block, 10, world);
  });
}

TEST_P(ParallelizeTest, WithoutAxesNothingIsDivided) {
  on_ranks(GetParam(), [](Communicator& world) {
    MoeBlock block = block_of(10);
    const auto* up = block.parameters.views().experts[0].up.data();
    EXPECT_EQ(apply(block, nullptr), 0);
    EXPECT_EQ(block.comm, nullptr);
    const auto alone = connect();
    Mesh without(world, {{"dp", world.size()}});
    Mesh one(world, {{"dp", world.size()}, {"ep", 1}});
    for (Mesh* mesh : {&without, &one, &without}) {
      EXPECT_EQ(apply(block, mesh), 0);
      EXPECT_EQ(block.parameters.views().experts[0].up.data(), up);
      expect_divided(block, 10, *alone);
      const MoeLayer layer(*block.comm, block.placement, options_with(10));
    }
    Mesh mesh(world, {{"ep", world.size()}});  // whole still: it can be divided yet
    EXPECT_EQ(apply(block, &mesh), world.size() > 1 ? 1 : 0);
    expect_divided(block, 10, world);
  });
}

struct Model {
  std::vector<MoeBlock> blocks;
  std::vector<MoeBlock*> moe_blocks() {
    std::vector<MoeBlock*> result;
    for (auto& block : blocks) result.push_back(&block);
    return result;
  }
};

TEST_P(ParallelizeTest, DividesAModelThatComputesAsBefore) {
  on_ranks(GetParam(), [](Communicator& world) {
    Mesh mesh(world, {{"ep", world.size()}});
    Model model{{block_of(10, "layers.0.mlp"), block_of(7, "layers.1.mlp")}};
    Model whole{{block_of(10), block_of(7)}};
    EXPECT_EQ(apply_expert_parallel(model, &mesh), world.size() > 1 ? 2 : 0);
    const auto alone = connect();
    const Tensor x = testing::Random(1).tensor({400, 8}, Dtype::f32);
    const auto mine = testing::awkward_piece(world, 400);
    for (std::size_t i = 0; i < 2; ++i) {
      const MoeBlock& block = model.blocks[i];
      const auto options = options_with(block.placement.num_experts());
      MoeLayer layer(*block.comm, block.placement, options);
      MoeLayer expected(*alone, whole.blocks[i].placement, options);
      const Tensor y = expected.forward(whole.blocks[i].parameters.weights(), {.x = x});
      EXPECT_TRUE(
          same_bits(layer.forward(block.parameters.weights(), {.x = mine.of(x)}), mine.of(y)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ParallelizeTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Parallelize, SeveralAxesAreOneGroup) {
  run_ranks(8, [](Communicator& world) {
    Mesh mesh(world, {{"dp", 2}, {"ep", 2}, {"sp", 2}});
    MoeBlock block = block_of(10);
    EXPECT_EQ(apply(block, &mesh, {"sp", "ep", "tp"}), 1);  // in any order; tp is not there
    expect_divided(block, 10, mesh.comm({"ep", "sp"}));
  });
}

}  // namespace
}  // namespace switchyard::parallelize_test
