// SPDX-License-Identifier: Apache-2.0
// Checkpoints as Hugging Face publishes them, opened and given to from_hugging_face.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/checkpoint/checkpoint_files.h"
#include "support/compare.h"
#include "support/layer/moe_tensors.h"
#include "support/random.h"
#include "switchyard/checkpoint.h"

namespace switchyard::checkpoint_open_test {
namespace {

namespace fs = std::filesystem;
using testing::file_of;
using testing::FileTensor;
using testing::FileTensors;
using testing::named_tensors;
using testing::same_bits;
using testing::zeros;
using Names = std::vector<std::string>;

constexpr int kExperts = 5;
constexpr std::int64_t kHidden = 6;
constexpr std::int64_t kInner = 4;

// The same tensors as a checkpoint on the disk and as views of memory.
class Model {
 public:
  explicit Model(Dtype dtype) : dtype_(dtype) {}

  Model& add(const std::string& name, const Shape& shape) { return add(name, shape, dtype_); }
  Model& add(const std::string& name, const Shape& shape, Dtype dtype) {
    Tensor tensor = random_.tensor(shape, dtype);
    std::vector<std::int64_t> extents;
    for (int i = 0; i < shape.rank(); ++i) extents.push_back(shape[i]);
    const std::string data(reinterpret_cast<const char*>(tensor.data()),
                           static_cast<std::size_t>(tensor.bytes()));
    files_[name] = FileTensor{dtype == Dtype::f32 ? "F32" : "BF16", extents, data};
    views_[name] = tensor.view();
    return *this;
  }
  Model& add_expert(const std::string& stem, const Names& names, std::int64_t inner = kInner) {
    return add(stem + names[0], {inner, kHidden})
        .add(stem + names[1], {inner, kHidden})
        .add(stem + names[2], {kHidden, inner});
  }

  const FileTensors& files() const { return files_; }
  const NamedTensors& views() const { return views_; }

 private:
  testing::Random random_{3};
  Dtype dtype_;
  FileTensors files_;
  NamedTensors views_;
};

const Names kProjections{"gate_proj.weight", "up_proj.weight", "down_proj.weight"};

enum class Form { per_expert, packed };

// Two layers of what all of them have.
Model model(Dtype dtype, Form form, const std::string& block, const Names& names) {
  Model result(dtype);
  result.add("lm_head.weight", {7, kHidden});
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    result.add(layer + "self_attn.q_proj.weight", {kHidden, kHidden});
    result.add(layer + block + "gate.weight", {kExperts, kHidden});
    const auto experts = layer + block + "experts.";
    if (form == Form::packed) {
      result.add(experts + "gate_up_proj", {kExperts, 2 * kInner, kHidden})
          .add(experts + "down_proj", {kExperts, kHidden, kInner});
      continue;
    }
    for (int e = 0; e < kExperts; ++e) {
      result.add_expert(experts + std::to_string(e) + ".", names);
    }
  }
  return result;
}

Model deepseek_v3(Form form) {
  auto result = model(Dtype::bf16, form, "mlp.", kProjections);
  for (const std::string layer : {"model.layers.0.mlp.", "model.layers.1.mlp."}) {
    result.add(layer + "gate.e_score_correction_bias", {kExperts}, Dtype::f32);
    result.add_expert(layer + "shared_experts.", kProjections, 2 * kInner);
  }
  return result;
}

void expect_same(const ConstTensorView& actual, const ConstTensorView& expected) {
  ASSERT_EQ(actual.data() == nullptr, expected.data() == nullptr);
  if (actual.data() != nullptr) {
    EXPECT_TRUE(same_bits(actual, expected));
  }
}

void expect_same(const ExpertWeights& actual, const ExpertWeights& expected) {
  const auto wanted = named_tensors(expected);
  const auto given = named_tensors(actual);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    SCOPED_TRACE(wanted[i].first);
    expect_same(given[i].second, wanted[i].second);
  }
}

// Every rank of several placements gets from the checkpoint what it gets from memory.
void expect_blocks(const Checkpoint& checkpoint, const Model& model, const std::string& block) {
  const std::vector<ExpertPlacement> placements{
      ExpertPlacement::contiguous(kExperts, 1), ExpertPlacement::contiguous(kExperts, 2),
      ExpertPlacement::from_lists(kExperts, {{0, 3}, {}, {1, 2, 4}})};
  for (const auto& placement : placements) {
    for (int rank = 0; rank < placement.num_ranks(); ++rank) {
      for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
        const auto actual = from_hugging_face(checkpoint.tensors(), layer + block, placement, rank);
        const auto expected = from_hugging_face(model.views(), layer + block, placement, rank);
        expect_same(actual.router.gate, expected.router.gate);
        expect_same(actual.router.score_bias, expected.router.score_bias);
        expect_same(actual.shared, expected.shared);
        ASSERT_EQ(actual.experts.size(), placement.experts_of(rank).size());
        for (std::size_t i = 0; i < actual.experts.size(); ++i) {
          expect_same(actual.experts[i], expected.experts[i]);
        }
      }
    }
  }
}

class CheckpointOpen : public testing::CheckpointFiles {
 protected:
  // As one file, and in pieces that tear every expert apart, by index and by folder.
  void expect_opens(const Model& model, const std::string& block) const {
    const auto one = put("one.safetensors", file_of(model.files()));
    expect_blocks(Checkpoint::open(one), model, block);
    fs::remove(one);
    const auto index = put_shards(model.files(), 3);
    for (const auto& path : {index, directory_}) {
      const auto checkpoint = Checkpoint::open(path);
      EXPECT_EQ(checkpoint.files().size(), 3U);
      EXPECT_EQ(checkpoint.tensors().size(), model.views().size());
      expect_blocks(checkpoint, model, block);
    }
  }
};

TEST_F(CheckpointOpen, Mixtral) {
  const std::string block = "block_sparse_moe.";
  const Names names{"w1.weight", "w3.weight", "w2.weight"};
  expect_opens(model(Dtype::bf16, Form::per_expert, block, names), block);
  expect_opens(model(Dtype::f32, Form::packed, block, names), block);
}

TEST_F(CheckpointOpen, Qwen3MoeAndOlmoe) {
  expect_opens(model(Dtype::bf16, Form::per_expert, "mlp.", kProjections), "mlp.");
  expect_opens(model(Dtype::f32, Form::per_expert, "mlp.", kProjections), "mlp.");
  expect_opens(model(Dtype::bf16, Form::packed, "mlp.", kProjections), "mlp.");
}

TEST_F(CheckpointOpen, DeepSeekV3) {
  expect_opens(deepseek_v3(Form::per_expert), "mlp.");
  expect_opens(deepseek_v3(Form::packed), "mlp.");
}

TEST_F(CheckpointOpen, SaysWhatItFound) {
  const auto index = put_shards(
      {{"a", zeros("F32", {2}, 4)}, {"b", zeros("F8_E4M3", {3}, 1)}, {"c", zeros("I64", {}, 8)}},
      2);
  const auto checkpoint = Checkpoint::open(directory_);
  EXPECT_EQ(checkpoint.path(), directory_);
  EXPECT_EQ(Checkpoint::open(index).path(), index);
  EXPECT_EQ(checkpoint.metadata(), (std::map<std::string, std::string>{{"total_size", "19"}}));
  ASSERT_EQ(checkpoint.files().size(), 2U);
  EXPECT_EQ(checkpoint.files()[1].path(), directory_ / "model-1.safetensors");
  EXPECT_EQ(checkpoint.names(), (Names{"a", "b", "c"}));
  EXPECT_EQ(checkpoint.file_of("b").path(), directory_ / "model-1.safetensors");
  EXPECT_EQ(checkpoint.tensors().size(), 2U);  // F8 is listed, but not read
  EXPECT_EQ(checkpoint.tensor("c").data(), checkpoint.tensors().at("c").data());
}

TEST_F(CheckpointOpen, MetadataMayBeOfAnyScalarOrMissing) {
  put("a.safetensors", file_of({{"w", zeros("F32", {1}, 4)}}));
  const auto metadata_of = [&](const std::string& metadata) {
    return Checkpoint::open(put("x.safetensors.index.json",
                                "{" + metadata + R"("weight_map":{"w":"a.safetensors"}})"))
        .metadata();
  };
  EXPECT_TRUE(metadata_of("").empty());
  EXPECT_EQ(metadata_of(R"("metadata":{"a":"1","b":2,"c":-3,"d":1.50,"e":true,"f":null},)"),
            (std::map<std::string, std::string>{
                {"a", "1"}, {"b", "2"}, {"c", "-3"}, {"d", "1.50"}, {"e", "true"}, {"f", "null"}}));
  EXPECT_TRUE(
      Checkpoint::open(put("x.safetensors.index.json", R"({"weight_map":{}})")).tensors().empty());
}

// As Hugging Face does: what the index does not list is not part of the checkpoint.
TEST_F(CheckpointOpen, LeavesOutWhatTheIndexDoesNotList) {
  put("a.safetensors", file_of({{"v", zeros("F32", {1}, 4)}, {"w", zeros("F32", {1}, 4)}}));
  put("b.safetensors", file_of({{"w", zeros("F32", {1}, 4)}}));
  put("x.safetensors.index.json",
      R"({"metadata":{"total_size":1},"weight_map":{"w":"a.safetensors"}})");
  const auto checkpoint = Checkpoint::open(directory_);
  EXPECT_EQ(checkpoint.names(), Names{"w"});
  EXPECT_EQ(checkpoint.tensors().size(), 1U);
  EXPECT_EQ(checkpoint.files().size(), 1U);
}

TEST_F(CheckpointOpen, AFolderWithoutAnIndexIsAllItsFiles) {
  put("a.safetensors", file_of({{"v", zeros("F32", {1}, 4)}}, {{"format", "pt"}, {"part", "a"}}));
  put(".hidden.safetensors", "not one");
  EXPECT_EQ(Checkpoint::open(directory_).metadata().at("part"), "a");
  put("b.safetensors", file_of({{"w", zeros("F32", {1}, 4)}}, {{"format", "pt"}, {"part", "b"}}));
  const auto both = Checkpoint::open(directory_);
  EXPECT_EQ(both.names(), (Names{"v", "w"}));
  EXPECT_EQ(both.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
}

TEST_F(CheckpointOpen, ViewsOutliveTheCheckpoint) {
  ConstTensorView view;
  {
    const auto path = put("a.safetensors", file_of({{"w", zeros("F32", {1}, 4)}}));
    view = Checkpoint::open(path).tensor("w");
    fs::remove(path);
  }
  EXPECT_EQ(view.span<float>()[0], 0.0F);
}

}  // namespace
}  // namespace switchyard::checkpoint_open_test
