// SPDX-License-Identifier: Apache-2.0
// switchyard inspect: what it lists and folds, and what it says of damaged files.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/inspect_files.h"
#include "cli/train_runs.h"

namespace switchyard::inspect_test {
namespace {

using nlohmann::json;
using testing::about;
using testing::expect_says;
using testing::file_of;
using testing::joined;
using testing::layers;
using testing::lines_of;
using testing::run;
using testing::zeros;

class Inspect : public testing::InspectFiles {};

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

TEST_F(Inspect, HalfPrecisionCanBeRead) {
  const auto path =
      put("a.safetensors",
          file_of({{"half", zeros("F16", {2, 3}, 2)}, {"tiny", zeros("F8_E4M3", {1}, 1)}}));
  expect_says(run(shell(path)), {"  half  F16      [2, 3]        12 B\n",
                                 "  tiny  F8_E4M3  [1]            1 B  cannot be read\n"});
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

TEST_F(Inspect, NamesDoNotReachTheTerminalUnescaped) {
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

class InspectRun : public testing::TrainRuns {};

// A folder of checkpoints is its newest, and what the optimizer keeps is no block of the model.
TEST_F(InspectRun, TheFolderThatARunSaves) {
  ASSERT_EQ(train("--ranks 2 --steps 3 --every 2 --save " + saved()).status, 0);
  const auto outcome = run("inspect " + saved() + " --json --ranks 2");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(lines_of(outcome).at(0).at("checkpoint"), checkpoint(3));
  const auto blocks = about("block", outcome);
  ASSERT_EQ(blocks.size(), 1U);
  EXPECT_EQ(blocks[0].at("count"), 2);
  EXPECT_EQ(blocks[0].at("missing"), json::array());
  EXPECT_EQ(blocks[0].at("block").get<std::string>().find("optimizer"), std::string::npos);
  // 3 matrices of 2 experts in 2 layers, and two moments of each.
  EXPECT_EQ(about("rank", outcome).at(1).at("expert_bytes"), 2 * 3 * (2 * 3 * 32 * 32 * 4));
  expect_says(
      run("inspect " + saved()),
      {checkpoint(3) + ": 1 file", "Not listed: optimizer tensors of the same form, 4 blocks.\n"});
}

TEST_F(Inspect, HelpNamesEveryFlag) {
  const auto help = run("inspect --help");
  EXPECT_EQ(help.status, 0);
  expect_says(help, {"PATH", "--ranks N", "--all", "--json"});
}

}  // namespace
}  // namespace switchyard::inspect_test
