// SPDX-License-Identifier: Apache-2.0
// switchyard inspect: the MoE blocks it finds, and what ranks read of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/inspect_files.h"

namespace switchyard::inspect_blocks_test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::about;
using testing::expect_says;
using testing::file_of;
using testing::FileTensors;
using testing::joined;
using testing::layers;
using testing::run;
using testing::zeros;

class InspectBlocks : public testing::InspectFiles {};

TEST_F(InspectBlocks, FindsBlocksAndWhatRanksRead) {
  put_shards(joined(layers(0, 2, 5), {{"norm", zeros("F32", {25}, 4)}}), 2);
  const auto outcome = run(shell(directory_) + "--json --ranks 3");
  const auto blocks = about("block", outcome);
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0], (json{{"block", "model.layers.{0,1}.mlp."},
                             {"count", 2},
                             {"layout", "Hugging Face, by expert"},
                             {"num_experts", 5},
                             {"num_held", 5},
                             {"hidden", 8},
                             {"intermediate", 4},
                             {"dtype", "BF16"},
                             {"router_bias", json::array()},
                             {"shared_intermediate", 0},
                             {"readable", true},
                             {"missing", json::array()}}));
  const auto ranks = about("rank", outcome);
  ASSERT_EQ(ranks.size(), 3U);
  const int expert = 3 * 64;
  const int replicated = 2 * 80 + 100;
  for (const int rank : {0, 1, 2}) {
    const auto& line = ranks[static_cast<std::size_t>(rank)];
    const int owned = rank == 2 ? 1 : 2;
    EXPECT_EQ(line.at("rank"), rank);
    EXPECT_EQ(line.at("experts"),
              json::array({{{"num_experts", 5}, {"first", 2 * rank}, {"count", owned}}}));
    EXPECT_EQ(line.at("expert_bytes"), 2 * owned * expert);
    EXPECT_EQ(line.at("replicated_bytes"), replicated);
    EXPECT_EQ(line.at("bytes"), 2 * owned * expert + replicated);
  }
  expect_says(run(shell(directory_) + "--ranks 7"),
              {"0…", "4 of 5\n", "none of 5\n", "model.layers.{0,1}.mlp."});
  EXPECT_EQ(names("block", directory_, "--all"),
            (std::vector<std::string>{"model.layers.0.mlp.", "model.layers.1.mlp."}));
}

TEST_F(InspectBlocks, RecognisesEveryLayout) {
  const FileTensors tensors{
      {"deepseek.gate.weight", zeros("BF16", {4, 8}, 2)},
      {"deepseek.gate.e_score_correction_bias", zeros("F32", {4}, 4)},
      {"deepseek.experts.gate_up_proj", zeros("BF16", {4, 6, 8}, 2)},
      {"deepseek.experts.down_proj", zeros("BF16", {4, 8, 3}, 2)},
      {"deepseek.shared_experts.up_proj.weight", zeros("BF16", {7, 8}, 2)},
      {"deepseek.shared_experts.down_proj.weight", zeros("BF16", {8, 7}, 2)},
      {"kempner.router.gate.weight", zeros("F32", {6, 8}, 4)},
      {"kempner.router.expert_bias", zeros("F32", {6}, 4)},
      {"kempner.up_w", zeros("F32", {3, 8, 5}, 4)},
      {"kempner.down_w", zeros("F32", {3, 5, 8}, 4)},
      {"mixtral.gate.weight", zeros("BF16", {2, 8}, 2)},
      {"mixtral.experts.0.w2.weight", zeros("BF16", {8, 9}, 2)},
      {"mixtral.experts.0.w3.weight", zeros("BF16", {9, 8}, 2)},
      {"mixtral.experts.1.w2.weight", zeros("BF16", {8, 9}, 2)},
      {"mixtral.experts.1.w3.weight", zeros("BF16", {9, 8}, 2)},
      {"dense.gate.weight", zeros("BF16", {2, 8}, 2)},
  };
  const auto path = put("a.safetensors", file_of(tensors));
  const auto outcome = run(shell(path) + "--json --ranks 2");
  const auto blocks = about("block", outcome);
  ASSERT_EQ(blocks.size(), 3U);
  EXPECT_EQ(blocks[0].at("layout"), "Hugging Face, packed");
  EXPECT_EQ(blocks[0].at("intermediate"), 3);
  EXPECT_EQ(blocks[0].at("router_bias"), json{"score"});
  EXPECT_EQ(blocks[0].at("shared_intermediate"), 7);
  EXPECT_EQ(blocks[1].at("layout"), "KempnerForge, packed");
  EXPECT_EQ(blocks[1].at("intermediate"), 5);
  EXPECT_EQ(blocks[1].at("num_held"), 3);
  EXPECT_EQ(blocks[2].at("layout"), "Mixtral, by expert");
  EXPECT_EQ(blocks[2].at("intermediate"), 9);
  const auto rank = about("rank", outcome).at(1);
  EXPECT_EQ(rank.at("expert_bytes"), 2 * (6 * 8 + 8 * 3) * 2 + 2 * 9 * 8 * 2);
  EXPECT_EQ(rank.at("not_counted"), json{"kempner."});
  expect_says(
      run(shell(path) + "--ranks 2"),
      {"3 of 6", "1 of 2, 2…3 of 4\n", "Not counted, because they are incomplete: kempner.\n"});
}

// inspect names each tensor that a conversion would miss, and does not count such a block.
TEST_F(InspectBlocks, ABlockThatLacksATensorIsIncomplete) {
  auto tensors = layers(0, 1, 3);
  tensors.erase("model.layers.0.mlp.experts.1.down_proj.weight");
  tensors.erase("model.layers.0.mlp.experts.2.gate_proj.weight");
  const FileTensors others{
      {"packed.gate.weight", zeros("BF16", {4, 8}, 2)},
      {"packed.experts.gate_up_proj", zeros("BF16", {4, 6, 8}, 2)},
      {"packed.shared_expert.gate_proj.weight", zeros("BF16", {3, 8}, 2)},
      {"packed.shared_expert.up_proj.weight", zeros("BF16", {3, 8}, 2)},
      {"kempner.router.gate.weight", zeros("F32", {2, 8}, 4)},
      {"kempner.up_w", zeros("F32", {2, 8, 5}, 4)},
      {"oss.router.weight", zeros("BF16", {2, 8}, 2)},
      {"oss.experts.gate_up_proj", zeros("BF16", {2, 8, 6}, 2)},
  };
  const auto path = put("a.safetensors", file_of(joined(tensors, others)));
  const auto outcome = run(shell(path) + "--json --ranks 1");
  const auto blocks = about("block", outcome);
  ASSERT_EQ(blocks.size(), 4U);
  EXPECT_EQ(blocks[0].at("missing"), json{"down_w"});
  EXPECT_EQ(blocks[1].at("num_held"), 1);
  EXPECT_EQ(blocks[1].at("missing"),
            (json{"experts.1.down_proj.weight", "experts.2.gate_proj.weight"}));
  EXPECT_EQ(blocks[2].at("missing"), (json{"experts.down_proj", "experts.gate_up_proj_bias",
                                           "experts.down_proj_bias", "router.bias"}));
  EXPECT_EQ(blocks[3].at("missing"), (json{"experts.down_proj", "shared_expert.down_proj.weight"}));
  EXPECT_EQ(blocks[3].at("shared_intermediate"), 3);
  const auto rank = about("rank", outcome).at(0);
  EXPECT_EQ(rank.at("expert_bytes"), 0);
  EXPECT_EQ(rank.at("not_counted").size(), 4U);
  expect_says(run(shell(path)), {"1 of 3", "  incomplete: no down_w\n",
                                 "  incomplete: no experts.down_proj and 3 more\n"});
}

// As save_checkpoint writes experts without gates, and a router with a bias.
TEST_F(InspectBlocks, ExpertsWithoutGatesAndABiasOfTheRouter) {
  const auto path =
      put("a.safetensors", file_of({{"mlp.gate.weight", zeros("F32", {4, 8}, 4)},
                                    {"mlp.gate.bias", zeros("F32", {4}, 4)},
                                    {"mlp.experts.up_proj", zeros("F32", {4, 6, 8}, 4)},
                                    {"mlp.experts.down_proj", zeros("F32", {4, 8, 6}, 4)},
                                    {"mlp.experts.deeper.still", zeros("F32", {4}, 4)}}));
  const auto outcome = run(shell(path) + "--json --ranks 4");
  const auto block = about("block", outcome).at(0);
  EXPECT_EQ(block.at("layout"), "Hugging Face, packed");
  EXPECT_EQ(block.at("intermediate"), 6);
  EXPECT_EQ(block.at("num_held"), 4);
  EXPECT_EQ(block.at("router_bias"), json{"gate"});
  EXPECT_EQ(about("rank", outcome).at(3).at("expert_bytes"), 2 * 6 * 8 * 4);
}

// A layout without a bias has an empty name for it; a tensor named like the prefix is not a bias.
TEST_F(InspectBlocks, ATensorCalledLikeThePrefixIsNoBias) {
  const auto path =
      put("a.safetensors", file_of({{"mlp.router.gate.weight", zeros("F32", {2, 8}, 4)},
                                    {"mlp.up_w", zeros("F32", {2, 8, 6}, 4)},
                                    {"mlp.", zeros("F32", {2}, 4)}}));
  EXPECT_EQ(about("block", run(shell(path) + "--json")).at(0).at("router_bias"), json::array());
}

// Seven experts over so many ranks, packed and by expert: as ExpertPlacement::contiguous.
TEST_F(InspectBlocks, RanksReadWhatTheyOwn) {
  auto tensors = layers(0, 1, 7);
  tensors["packed.gate.weight"] = zeros("BF16", {7, 8}, 2);
  tensors["packed.experts.gate_up_proj"] = zeros("BF16", {7, 8, 8}, 2);
  tensors["packed.experts.down_proj"] = zeros("BF16", {7, 8, 4}, 2);
  const auto path = put("a.safetensors", file_of(tensors));
  constexpr int kExpert = 3 * 64 + 128 + 64;
  for (const int num_ranks : {1, 2, 3, 7, 9}) {
    const auto lines =
        about("rank", run(shell(path) + "--json --ranks " + std::to_string(num_ranks)));
    ASSERT_EQ(lines.size(), static_cast<std::size_t>(num_ranks));
    int first = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto& line = lines[static_cast<std::size_t>(rank)];
      const int count = 7 / num_ranks + (rank < 7 % num_ranks ? 1 : 0);
      EXPECT_EQ(line.at("experts"),
                json::array({{{"num_experts", 7}, {"first", first}, {"count", count}}}));
      EXPECT_EQ(line.at("expert_bytes"), count * kExpert);
      first += count;
    }
  }
}

TEST_F(InspectBlocks, MarksWhatCannotBeRead) {
  const auto path = put(
      "a.safetensors", file_of({{"mlp.router.weight", zeros("BF16", {4, 64}, 2)},
                                {"mlp.router.bias", zeros("BF16", {4}, 2)},
                                {"mlp.experts.gate_up_proj_blocks", zeros("U8", {4, 12, 2, 16}, 1)},
                                {"mlp.experts.gate_up_proj_scales", zeros("U8", {4, 12, 2}, 1)},
                                {"mlp.experts.gate_up_proj_bias", zeros("BF16", {4, 12}, 2)},
                                {"mlp.experts.down_proj_blocks", zeros("U8", {4, 64, 1, 3}, 1)},
                                {"mlp.experts.down_proj_scales", zeros("U8", {4, 64, 1}, 1)},
                                {"mlp.experts.down_proj_bias", zeros("BF16", {4, 64}, 2)},
                                {"odd", zeros("F4", {1, 1, 1, 1, 1}, 1)}}));
  const auto table = run(shell(path));
  EXPECT_EQ(table.status, 0);
  expect_says(table, {"U8       [4, 12, 2, 16]      1.5 KiB  cannot be read\n",
                      "gpt-oss, quantized", "gate        none  cannot be read\n"});
  const auto block = about("block", run(shell(path) + "--json")).at(0);
  EXPECT_EQ(block.at("readable"), false);
  EXPECT_EQ(block.at("intermediate"), 6);
  EXPECT_EQ(block.at("dtype"), "U8");
  const auto rank = about("rank", run(shell(path) + "--json --ranks 4")).at(3);
  EXPECT_EQ(rank.at("expert_bytes"), 12 * 2 * 16 + 12 * 2 + 12 * 2 + 64 * 3 + 64 + 64 * 2);
}

TEST_F(InspectBlocks, GoldenFiles) {
  int num_files = 0;
  for (const auto& entry : fs::directory_iterator(SWITCHYARD_GOLDEN)) {
    if (entry.path().extension() != ".safetensors") continue;
    ++num_files;
    EXPECT_EQ(run(shell(entry.path()) + "--ranks 3").status, 0) << entry.path();
    const auto blocks = names("block", entry.path());
    EXPECT_NE(std::find(blocks.begin(), blocks.end(), "weight."), blocks.end()) << entry.path();
  }
  EXPECT_GT(num_files, 10);
}

}  // namespace
}  // namespace switchyard::inspect_blocks_test
