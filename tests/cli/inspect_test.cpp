// switchyard inspect: what it lists, folds and finds, and what it says of damaged files.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.h"
#include "support/checkpoint_files.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::file_of;
using testing::FileTensors;
using testing::lines_of;
using testing::Outcome;
using testing::run;
using testing::zeros;

// Layers first … last − 1 of `num_experts` experts, H = 8, I = 4, bf16.
FileTensors layers(int first, int last, int num_experts) {
  FileTensors tensors;
  for (int layer = first; layer < last; ++layer) {
    const auto mlp = "model.layers." + std::to_string(layer) + ".mlp.";
    tensors[mlp + "gate.weight"] = zeros("BF16", {num_experts, 8}, 2);
    for (int e = 0; e < num_experts; ++e) {
      const auto stem = mlp + "experts." + std::to_string(e) + ".";
      tensors[stem + "gate_proj.weight"] = zeros("BF16", {4, 8}, 2);
      tensors[stem + "up_proj.weight"] = zeros("BF16", {4, 8}, 2);
      tensors[stem + "down_proj.weight"] = zeros("BF16", {8, 4}, 2);
    }
  }
  return tensors;
}

FileTensors joined(FileTensors a, const FileTensors& b) {
  a.insert(b.begin(), b.end());
  return a;
}

// The lines that are about `what`: "tensor", "block", "rank", …
std::vector<json> about(const std::string& what, const Outcome& outcome) {
  std::vector<json> result;
  for (const auto& line : lines_of(outcome)) {
    if (line.contains(what)) result.push_back(line);
  }
  return result;
}

class Inspect : public testing::CheckpointFiles {
 protected:
  std::string shell(const fs::path& path) const { return "inspect " + path.string() + " "; }

  // What `what` is called in each line about it.
  std::vector<std::string> names(const std::string& what, const fs::path& path,
                                 const std::string& flags = "") const {
    std::vector<std::string> result;
    for (const auto& line : about(what, run(shell(path) + "--json " + flags))) {
      result.push_back(line.at(what));
    }
    return result;
  }
};

void expect_says(const Outcome& outcome, const std::vector<std::string>& texts) {
  for (const auto& text : texts) {
    EXPECT_NE(outcome.output.find(text), std::string::npos) << text << "\n" << outcome.output;
  }
}

TEST_F(Inspect, APlainFile) {
  const auto path = put("a.safetensors",
                        file_of({{"w", zeros("F32", {2, 3}, 4)}, {"scalar", zeros("I64", {}, 8)}},
                                {{"format", "pt"}}));
  const auto table = run(shell(path));
  EXPECT_EQ(table.status, 0);
  expect_says(table, {path.string() + ": 1 file, 2 tensors, 32 B\n", "a.safetensors", "format: pt",
                      "  scalar  I64      []             8 B\n",
                      "  w       F32      [2, 3]        24 B\n", "No MoE blocks were found."});
  const auto outcome = run(shell(path) + "--json");
  const auto lines = lines_of(outcome);
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(lines[0], (json{{"checkpoint", path.string()},
                            {"files", 1},
                            {"tensors", 2},
                            {"bytes", 32},
                            {"metadata", {{"format", "pt"}}}}));
  EXPECT_EQ(lines[1],
            (json{{"file", "a.safetensors"}, {"tensors", 2}, {"not_in_index", 0}, {"bytes", 32}}));
  EXPECT_EQ(lines[3], (json{{"tensor", "w"},
                            {"dtype", "F32"},
                            {"shape", {2, 3}},
                            {"count", 1},
                            {"bytes", 24},
                            {"readable", true}}));
}

TEST_F(Inspect, FoldsExpertsAndLayersThatAgree) {
  auto tensors = joined(layers(0, 12, 10), {{"lm_head.weight", zeros("BF16", {3, 8}, 2)}});
  tensors["model.layers.11.mlp.experts.7.up_proj.weight"] = zeros("F32", {4, 8}, 4);
  put_shards(tensors, 3);
  EXPECT_EQ(names("tensor", directory_),
            (std::vector<std::string>{
                "lm_head.weight",
                "model.layers.{0…11}.mlp.experts.{0…9}.down_proj.weight",
                "model.layers.{0…11}.mlp.experts.{0…9}.gate_proj.weight",
                "model.layers.{0…10}.mlp.experts.{0…9}.up_proj.weight",
                "model.layers.{0…11}.mlp.gate.weight",
                "model.layers.11.mlp.experts.{0…6,8,9}.up_proj.weight",
                "model.layers.11.mlp.experts.7.up_proj.weight",
            }));
  const auto folded = about("tensor", run(shell(directory_) + "--json"));
  EXPECT_EQ(folded[1].at("count"), 120);
  EXPECT_EQ(folded[1].at("bytes"), 120 * 64);
  EXPECT_EQ(folded[3].at("count"), 110);
  const auto all = names("tensor", directory_, "--all");
  ASSERT_EQ(all.size(), tensors.size());
  EXPECT_EQ(all[1], "model.layers.0.mlp.experts.0.down_proj.weight");
  EXPECT_EQ(all[4], "model.layers.0.mlp.experts.1.down_proj.weight");
  EXPECT_EQ(all.back(), "model.layers.11.mlp.gate.weight");  // after 2 … 10
  expect_says(run(shell(directory_)), {"(120 × 64 B)", "model-2.safetensors", "total_size: "});
}

TEST_F(Inspect, FindsBlocksAndWhatRanksRead) {
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
                             {"readable", true}}));
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

TEST_F(Inspect, KnowsTheLayouts) {
  const FileTensors tensors{
      {"deepseek.gate.weight", zeros("BF16", {4, 8}, 2)},
      {"deepseek.gate.e_score_correction_bias", zeros("F32", {4}, 4)},
      {"deepseek.experts.gate_up_proj", zeros("BF16", {4, 6, 8}, 2)},
      {"deepseek.experts.down_proj", zeros("BF16", {4, 8, 3}, 2)},
      {"deepseek.shared_experts.up_proj.weight", zeros("BF16", {7, 8}, 2)},
      {"kempner.router.gate.weight", zeros("F32", {6, 8}, 4)},
      {"kempner.router.expert_bias", zeros("F32", {6}, 4)},
      {"kempner.up_w", zeros("F32", {3, 8, 5}, 4)},
      {"kempner.down_w", zeros("F32", {3, 5, 8}, 4)},
      {"mixtral.gate.weight", zeros("BF16", {2, 8}, 2)},
      {"mixtral.experts.0.w3.weight", zeros("BF16", {9, 8}, 2)},
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
  EXPECT_EQ(rank.at("expert_bytes"), 2 * (6 * 8 + 8 * 3) * 2 + 9 * 8 * 2);
  EXPECT_EQ(rank.at("not_counted"), json{"kempner."});
  expect_says(run(shell(path) + "--ranks 2"),
              {"3 of 6", "1 of 2, 2…3 of 4\n",
               "Not counted, since not all of their experts are there: kempner.\n"});
}

TEST_F(Inspect, MarksWhatCannotBeRead) {
  const auto path = put(
      "a.safetensors", file_of({{"mlp.router.weight", zeros("BF16", {4, 64}, 2)},
                                {"mlp.router.bias", zeros("BF16", {4}, 2)},
                                {"mlp.experts.gate_up_proj_blocks", zeros("U8", {4, 12, 2, 16}, 1)},
                                {"mlp.experts.gate_up_proj_scales", zeros("U8", {4, 12, 2}, 1)},
                                {"mlp.experts.gate_up_proj_bias", zeros("BF16", {4, 12}, 2)},
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
  EXPECT_EQ(rank.at("expert_bytes"), 12 * 2 * 16 + 12 * 2 + 12 * 2);
}

TEST_F(Inspect, NamesDoNotReachTheTerminalAsTheyAre) {
  const auto path = put("a.safetensors", file_of({{"a\x1b[2Jb", zeros("F32", {1}, 4)}},
                                                 {{"k", "v\n"}, {"long", std::string(200, 'x')}}));
  const auto table = run(shell(path));
  expect_says(table, {"a?[2Jb", "k: v?\n", "xxx… (200 bytes)\n"});
  EXPECT_EQ(table.output.find('\x1b'), std::string::npos);
}

TEST_F(Inspect, SaysWhatTheIndexLeavesOut) {
  put("a.safetensors", file_of({{"v", zeros("F32", {1}, 4)}, {"w", zeros("F32", {1}, 4)}}));
  put("x.safetensors.index.json", R"({"weight_map":{"w":"a.safetensors"}})");
  expect_says(run(shell(directory_)), {"1 file, 1 tensor, 4 B", "(1 more not in the index)"});
  EXPECT_EQ(about("file", run(shell(directory_) + "--json")).at(0).at("not_in_index"), 1);
}

TEST_F(Inspect, DamagedCheckpointsAreNamed) {
  const auto path = put("a.safetensors", file_of({{"w", zeros("F32", {1}, 4)}}).substr(0, 60));
  for (const auto& damaged : {path, directory_}) {
    const auto outcome = run(shell(damaged));
    EXPECT_EQ(outcome.status, 1);
    expect_says(outcome, {"switchyard: " + path.string() + ": the header's length"});
  }
  put("x.safetensors.index.json", R"({"weight_map":{"w":"b.safetensors"}})");
  const auto missing = run(shell(directory_));
  EXPECT_EQ(missing.status, 1);
  expect_says(missing, {"x.safetensors.index.json: there is no file 'b.safetensors' beside it"});
  EXPECT_EQ(run(shell(directory_ / "none")).status, 1);
  EXPECT_EQ(run("inspect").status, 2);
  const auto ranks = run(shell(path) + "--ranks 0");
  EXPECT_EQ(ranks.status, 2);
  expect_says(ranks, {"--ranks"});
}

TEST_F(Inspect, HelpNamesEveryFlag) {
  const auto help = run("inspect --help");
  EXPECT_EQ(help.status, 0);
  expect_says(help, {"PATH", "--ranks N", "--all", "--json"});
}

TEST_F(Inspect, GoldenFiles) {
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
}  // namespace switchyard
