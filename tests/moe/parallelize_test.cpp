#include "switchyard/parallelize.h"

#include <gtest/gtest.h>

#include <memory>

#include "support/compare.h"
#include "support/cut.h"
#include "support/errors.h"
#include "support/layer_alone.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"
#include "switchyard/run_ranks.h"

namespace switchyard {
namespace {

using testing::error_of;
using testing::on_ranks;
using testing::RankCase;
using testing::same_bits;

constexpr std::uint64_t kSeed = 5;

MoeLayerOptions options_with(int num_experts) {
  return {.hidden = 8,
          .intermediate = 6,
          .router = RouterOptions::torchtitan(num_experts, 2),
          .shared_intermediate = 4};
}

MoeBlock block_of(int num_experts, const std::string& name = "layers.3.mlp") {
  const auto whole = ExpertPlacement::contiguous(num_experts, 1);
  return {name, MoeParameters::random(options_with(num_experts), whole, 0, kSeed, Biases::all),
          whole};
}

int apply(MoeBlock& block, Mesh* mesh, const std::vector<std::string>& axes = {"ep"}) {
  const std::vector<MoeBlock*> blocks{&block};
  return apply_expert_parallel(blocks, mesh, axes);
}

// Each of them in memory of its own.
MoeGradients apart(const MoeGradients& tensors) {
  MoeGradients result = tensors;
  for (auto& e : result.experts) {
    for (auto* view : {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias}) {
      *view = testing::copy_of(*view);
    }
  }
  return result;
}

void expect_divided(const MoeBlock& block, int num_experts, Communicator& group) {
  EXPECT_EQ(block.group->size(), group.size());
  EXPECT_EQ(block.rank(), group.rank());
  EXPECT_EQ(block.placement, ExpertPlacement::contiguous(num_experts, group.size()));
  const auto expected = MoeParameters::random(options_with(num_experts), block.placement,
                                              group.rank(), kSeed, Biases::all);
  const auto [views, wanted] = std::pair(block.parameters.views(), expected.views());
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
      MoeGradients tensors = apart(block.parameters.views());
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
    EXPECT_EQ(block.group, nullptr);
    const auto alone = connect();
    Mesh without(world, {{"dp", world.size()}});
    Mesh one(world, {{"dp", world.size()}, {"ep", 1}});
    for (Mesh* mesh : {&without, &one, &without}) {
      EXPECT_EQ(apply(block, mesh), 0);
      EXPECT_EQ(block.parameters.views().experts[0].up.data(), up);
      expect_divided(block, 10, *alone);
      const MoeLayer layer(*block.group, block.placement, options_with(10));
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
      MoeLayer layer(*block.group, block.placement, options);
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
    expect_divided(block, 10, mesh.group({"ep", "sp"}));
  });
}

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
