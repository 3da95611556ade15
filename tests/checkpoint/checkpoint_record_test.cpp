// SPDX-License-Identifier: Apache-2.0
// Contents that a rank cannot save.
#include "checkpoint/checkpoint_record.h"

#include <gtest/gtest.h>

#include <functional>

#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "switchyard/error.h"

namespace switchyard::testing::checkpoint_record_test {
namespace {

const auto kPlacement = ExpertPlacement::contiguous(6, 2);

// Rank 1's experts 3, 4 and 5 of a layer that has everything.
CheckpointContents everything() {
  auto options = tiny_layer_options();
  options.shared_intermediate = 5;
  options.router.score_bias = ScoreBias::choice;
  Random random(4);
  const auto weights = part_of(random_layer(random, options, Biases::all), kPlacement, 1);
  return {.tensors = {{"norm", random.tensor({6}, Dtype::f32)}},
          .blocks = {{"mlp.", weights, kPlacement, 1}}};
}

std::string error(const CheckpointContents& contents, const std::filesystem::path& path = "x",
                  CheckpointForm form = CheckpointForm::one_file) {
  return error_of<InvalidArgument>([&] { record_of(path, contents, form); });
}

// Returns the error for everything() after one change of its block.
std::string block_error(const std::function<void(CheckpointBlock&)>& change) {
  auto contents = everything();
  change(contents.blocks[0]);
  return error(contents);
}

ConstTensorView zeros(const Shape& shape, Dtype dtype = Dtype::f32) {
  return Tensor::zeros(shape, dtype);
}

TEST(CheckpointRecord, TellsNamesFormsAndExperts) {
  const auto record = record_of("a/b/", everything(), CheckpointForm::file_per_rank);
  EXPECT_EQ(record.path, std::filesystem::current_path() / "a/b");
  EXPECT_EQ(record.tensors.size(), 1U + 3U + 6U);
  EXPECT_EQ(record.of_blocks.size(), 3U + 6U);
  EXPECT_FALSE(record.of_blocks.contains("norm"));
  EXPECT_EQ(record.tensors.at("mlp.gate.weight"), (TensorForm{Dtype::f32, {6, 6}}));
  const auto& block = record.blocks.at("mlp.");
  EXPECT_EQ(block.num_experts, 6);
  EXPECT_EQ(block.ids, (std::vector<std::int32_t>{3, 4, 5}));
  EXPECT_EQ(block.forms[kDown], (TensorForm{Dtype::f32, {6, 4}}));
}

TEST(CheckpointRecord, RefusesPathsWithoutAName) {
  for (const std::string path : {"", "/", ".", "a/..", "a/."}) {
    EXPECT_EQ(error({}, path), "path '" + path + "' must end in the name of a file or folder");
  }
}

TEST(CheckpointRecord, RefusesNamesAndMetadataThatAFileCannotHave) {
  EXPECT_EQ(error({.tensors = {{"__metadata__", zeros({1})}}}),
            "a tensor must not be named __metadata__");
  EXPECT_EQ(error({.metadata = {{"a", "\xff"}}}),
            "the metadata's 'a' is '\ufffd', which is not UTF-8");
  EXPECT_EQ(block_error([](auto& block) { block.prefix = std::string(1, '\xff'); }),
            "the tensor's name '\ufffdgate.weight' is not UTF-8");
  const CheckpointContents sized{.metadata = {{"total_size", "7"}}};
  EXPECT_EQ(error(sized), "no error");
  EXPECT_EQ(error(sized, "x", CheckpointForm::file_per_rank),
            "the metadata must not have a 'total_size': the index writes its own");
}

TEST(CheckpointRecord, RefusesWhatIsGivenTwice) {
  auto contents = everything();
  contents.tensors["mlp.gate.bias"] = zeros({6});
  EXPECT_EQ(error(contents), "tensor 'mlp.gate.bias' is given twice");
  contents = everything();
  contents.blocks.push_back(contents.blocks[0]);
  EXPECT_EQ(error(contents), "block 'mlp.' is given twice");
  EXPECT_EQ(error({.tensors = {{"w", ConstTensorView()}}}), "no error");
}

TEST(CheckpointRecord, RefusesABlockThatDoesNotFitItsPlacement) {
  EXPECT_EQ(block_error([](auto& block) { block.rank = 2; }),
            "block 'mlp.': rank (2) must be 0 to 1");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.experts.pop_back(); }),
            "block 'mlp.' has 2 experts, but rank 1 of its placement owns 3");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.router.gate = {}; }),
            "mlp.gate.weight is [0], but must have 2 extents");
  EXPECT_EQ(block_error([](auto& block) {
              block.tensors.router.gate = zeros({5, 6});
            }),
            "mlp.gate.weight is f32 [5,6], but must be [6,6] of f32 or bf16");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.router.gate_bias = zeros({5}); }),
            "mlp.gate.bias is f32 [5], but must be [6] of f32 or bf16");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.router.score_bias = zeros({5}); }),
            "mlp.gate.e_score_correction_bias is f32 [5], but must be [6] of f32 or bf16");
}

TEST(CheckpointRecord, RefusesIncompleteExperts) {
  EXPECT_EQ(block_error([](auto& block) { block.tensors.experts[1].up = {}; }),
            "mlp.experts.4.up_proj.weight is [0], but must have 2 extents");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.experts[1].down = {}; }),
            "mlp.experts.4.down_proj.weight [6,4] is missing");
  EXPECT_EQ(block_error([](auto& block) {
              block.tensors.shared.gate = zeros({4, 6});
            }),
            "mlp.shared_experts.gate_proj.weight is f32 [4,6], but must be [5,6] of f32 or bf16");
  EXPECT_EQ(
      block_error([](auto& block) { block.tensors.experts[0].down_bias = zeros({6}, Dtype::i32); }),
      "mlp.experts.3.down_proj.bias is i32 [6], but must be [6] of f32 or bf16");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.experts[0].gate_bias = {}; }),
            "mlp.experts.3.: gate and up must both have a bias, or neither");
  EXPECT_EQ(block_error([](auto& block) {
              block.tensors.experts[0].gate = zeros({4, 6}, Dtype::bf16);
            }),
            "mlp.experts.3.gate_proj.weight is bf16 [4,6], but mlp.experts.3.up_proj.weight is f32 "
            "[4,6]");
}

TEST(CheckpointRecord, RefusesASharedExpertWithoutUp) {
  EXPECT_EQ(block_error([](auto& block) { block.tensors.shared.up = {}; }),
            "mlp.shared_experts.up_proj.weight is [0], but must have 2 extents");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.shared = {}; }), "no error");
}

TEST(CheckpointRecord, RefusesExpertsThatDiffer) {
  EXPECT_EQ(block_error([](auto& block) {
              block.tensors.experts[2].down = zeros({6, 4}, Dtype::bf16);
            }),
            "mlp.experts.5.down_proj.weight is bf16 [6,4], but that of the rank's first expert is "
            "f32 [6,4]");
  EXPECT_EQ(block_error([](auto& block) { block.tensors.experts[2].down_bias = {}; }),
            "mlp.experts.5.down_proj.bias is missing, but that of the rank's first expert is f32 "
            "[6]");
}

}  // namespace
}  // namespace switchyard::testing::checkpoint_record_test
