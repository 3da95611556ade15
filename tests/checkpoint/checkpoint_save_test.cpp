// SPDX-License-Identifier: Apache-2.0
// Checkpoints that save_checkpoint writes, and reading them back.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "support/shared_folder.h"
#include "switchyard/checkpoint.h"

namespace switchyard::testing::checkpoint_save_test {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

constexpr auto kBothForms = {CheckpointForm::one_file, CheckpointForm::file_per_rank};

// A layer that has everything, or what the change leaves of it.
MoeLayerOptions full_options() {
  auto options = tiny_layer_options();
  options.shared_intermediate = 5;
  options.router.score_bias = ScoreBias::choice;
  return options;
}

class CheckpointSaveTest : public ::testing::TestWithParam<RankCase> {
 protected:
  // On all ranks, in a folder that they share.
  void on_all_ranks(const std::function<void(Communicator&, const fs::path&)>& body) {
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto folder = folder_.path(comm);
      body(comm, folder);
      comm.barrier();
    });
  }

  SharedFolder folder_;
};

void expect_round_trip(Communicator& comm, const fs::path& path, const MoeWeights& whole,
                       CheckpointForm form) {
  const auto num_experts = static_cast<int>(whole.experts.size());
  const auto placement = ExpertPlacement::contiguous(num_experts, comm.size());
  const auto part = part_of(whole, placement, comm.rank());
  save_checkpoint(comm, path, {.blocks = {{"mlp.", part, placement, comm.rank()}}}, form);
  auto into = gradients_for(part);
  if (part.router.score_bias.data() != nullptr) {
    into.router.score_bias = Tensor({num_experts}, Dtype::f32).view();
  }
  load_block(Checkpoint::open(path), "mlp.", placement, comm.rank(), into);
  EXPECT_TRUE(same_bits(into.router.gate, part.router.gate));
  EXPECT_TRUE(same_bits(into.router.gate_bias, part.router.gate_bias));
  EXPECT_TRUE(same_bits(into.router.score_bias, part.router.score_bias));
  const auto expect_same = [](const ExpertViews& actual, const ExpertWeights& expected) {
    const auto tensors = named_tensors(expected);
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      EXPECT_TRUE(same_bits(named_tensors(actual)[t].second, tensors[t].second))
          << tensors[t].first;
    }
  };
  for (std::size_t i = 0; i < part.experts.size(); ++i)
    expect_same(into.experts[i], part.experts[i]);
  expect_same(into.shared, part.shared);
  comm.barrier();
}

TEST_P(CheckpointSaveTest, EveryFormOfALayerIsReadBack) {
  on_all_ranks([](Communicator& comm, const fs::path& folder) {
    for (const auto activation : {Activation::swiglu, Activation::relu}) {
      for (const Biases biases : {Biases::none, Biases::all}) {
        auto options = full_options();
        options.activation = options.shared_activation = activation;
        options.dtype = biases == Biases::all ? Dtype::bf16 : Dtype::f32;
        Random random(8);
        auto whole = random_layer(random, options, biases);
        expect_round_trip(comm, folder / "file", whole, CheckpointForm::one_file);
        expect_round_trip(comm, folder / "folder", whole, CheckpointForm::file_per_rank);
        whole.shared = {};
        whole.router.score_bias = whole.router.gate_bias = {};
        expect_round_trip(comm, folder / "file", whole, CheckpointForm::one_file);
        expect_round_trip(comm, folder / "folder", whole, CheckpointForm::file_per_rank);
      }
    }
  });
}

TEST_P(CheckpointSaveTest, NamesAreThoseOfHuggingFace) {
  on_all_ranks([](Communicator& comm, const fs::path& folder) {
    const auto options = full_options();
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    const auto part = MoeParameters::random(options, placement, comm.rank(), 3, Biases::all);
    const CheckpointContents contents{.blocks = {{"mlp.", part.weights(), placement, comm.rank()}},
                                      .metadata = {{"step", "7"}}};
    save_checkpoint(comm, folder / "file", contents);
    const auto file = Checkpoint::open(folder / "file");
    EXPECT_EQ(file.metadata(),
              (std::map<std::string, std::string>{{"format", "pt"}, {"step", "7"}}));
    Names names;
    for (const auto& [name, view] : file.tensors()) names.insert(name.substr(4));
    EXPECT_EQ(names,
              (Names{"gate.weight", "gate.bias", "gate.e_score_correction_bias",
                     "experts.gate_up_proj", "experts.gate_up_proj_bias", "experts.down_proj",
                     "experts.down_proj_bias", "shared_experts.gate_proj.weight",
                     "shared_experts.up_proj.weight", "shared_experts.down_proj.weight"}));
    save_checkpoint(comm, folder / "folder/", contents, CheckpointForm::file_per_rank);
    const auto by_id = Checkpoint::open(folder / "folder");
    EXPECT_EQ(by_id.metadata().at("step"), "7");
    std::int64_t bytes = 0;
    for (const auto& [name, view] : by_id.tensors()) bytes += view.bytes();
    EXPECT_EQ(by_id.metadata().at("total_size"), std::to_string(bytes));
    EXPECT_EQ(by_id.tensors().size(), 6U + 6U * 6U);
    for (const int id : {0, 5}) {
      for (const char* name : {"gate_proj.weight", "up_proj.weight", "down_proj.weight",
                               "gate_proj.bias", "up_proj.bias", "down_proj.bias"}) {
        EXPECT_TRUE(by_id.tensors().contains("mlp.experts." + std::to_string(id) + "." + name));
      }
    }
  });
}

// Ranks beyond the experts have no file.
TEST_P(CheckpointSaveTest, AnIndexSaysWhereEveryTensorIs) {
  on_all_ranks([](Communicator& comm, const fs::path& folder) {
    const auto options = tiny_layer_options();
    const auto placement = ExpertPlacement::contiguous(6, comm.size());
    const auto part = MoeParameters::random(options, placement, comm.rank(), 3);
    save_checkpoint(comm, folder / "x",
                    {.blocks = {{"mlp.", part.weights(), placement, comm.rank()}}},
                    CheckpointForm::file_per_rank);
    const int num_files = std::min(comm.size(), 6);
    std::ifstream stream(folder / "x/model.safetensors.index.json");
    const auto index = nlohmann::json::parse(stream);
    EXPECT_EQ(index.at("metadata"), (nlohmann::json{{"total_size", 4 * (36 + 6 * 3 * 24)}}));
    Names files{"model.safetensors.index.json"};
    for (int i = 1; i <= num_files; ++i) {
      const auto of = "-of-0000" + std::to_string(num_files) + ".safetensors";
      files.insert("model-0000" + std::to_string(i) + of);
    }
    EXPECT_EQ(Folder::names_in(folder / "x"), files);
    EXPECT_EQ(index.at("weight_map").size(), 1U + 6U * 3U);
    for (const auto& [name, file] : index.at("weight_map").items()) {
      EXPECT_TRUE(SafetensorsFile::open(folder / "x" / file.get<std::string>()).contains(name));
    }
  });
}

// Replicas hold the same bytes; where they do not, it shows whose were taken.
TEST_P(CheckpointSaveTest, TheLowestRankWritesReplicas) {
  on_all_ranks([](Communicator& comm, const fs::path& folder) {
    const int parts = std::min(2, comm.size());
    const auto placement = ExpertPlacement::contiguous(6, parts);
    const int rank = comm.rank() % parts;
    const auto seed = static_cast<std::uint64_t>(comm.rank() / parts);
    const auto part = MoeParameters::random(tiny_layer_options(), placement, rank, seed);
    for (const auto form : kBothForms) {
      const auto path = folder / (form == CheckpointForm::one_file ? "file" : "folder");
      save_checkpoint(comm, path, {.blocks = {{"mlp.", part.weights(), placement, rank}}}, form);
      const auto expected = MoeParameters::random(tiny_layer_options(), placement, rank, 0);
      MoeParameters loaded(tiny_layer_options(), placement, rank);
      const auto checkpoint = Checkpoint::open(path);
      EXPECT_EQ(checkpoint.files().size(),
                form == CheckpointForm::one_file ? 1U : static_cast<std::size_t>(parts));
      load_block(checkpoint, "mlp.", placement, rank, loaded.views());
      EXPECT_TRUE(same_bits(loaded.weights().router.gate, expected.weights().router.gate));
      for (std::size_t i = 0; i < loaded.weights().experts.size(); ++i) {
        expect_same_bits(loaded.weights().experts[i], expected.weights().experts[i]);
      }
    }
  });
}

// Views of the old one keep what they see.
TEST_P(CheckpointSaveTest, AnOldCheckpointIsReplaced) {
  on_all_ranks([](Communicator& comm, const fs::path& folder) {
    for (const auto form : kBothForms) {
      const auto path = folder / (form == CheckpointForm::one_file ? "file" : "folder");
      save_checkpoint(comm, path, {.tensors = {{"old", Tensor::from<float>({1}, {1.0F})}}}, form);
      const auto old = Checkpoint::open(path);
      comm.barrier();
      save_checkpoint(comm, path, {.tensors = {{"new", Tensor::from<float>({1}, {2.0F})}}}, form);
      EXPECT_EQ(Checkpoint::open(path).tensor("new").span<float>()[0], 2.0F);
      EXPECT_FALSE(Checkpoint::open(path).tensors().contains("old"));
      EXPECT_EQ(old.tensor("old").span<float>()[0], 1.0F);
    }
    EXPECT_EQ(Folder::names_in(folder), (Names{"file", "folder"}));
    EXPECT_EQ(Folder::names_in(folder / "folder").size(), 2U);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointSaveTest, ::testing::ValuesIn(rank_cases()),
                         rank_case_name);

}  // namespace
}  // namespace switchyard::testing::checkpoint_save_test
