// SPDX-License-Identifier: Apache-2.0
// Loading parts of a checkpoint into memory of one's own.
#include <gtest/gtest.h>

#include <fstream>

#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/layer/layer_alone.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard::testing::checkpoint_load_test {
namespace {

const std::string kPrefix = "mlp.";

// A layer of six experts saved by one rank, and where a rank of two would load its part.
class CheckpointLoad : public ::testing::Test {
 protected:
  void save(const MoeLayerOptions& options, Biases biases = Biases::none) {
    const auto alone = ExpertPlacement::contiguous(6, 1);
    whole_ = MoeParameters::random(options, alone, 0, 9, biases);
    const auto world = connect();
    save_checkpoint(*world, path(),
                    {.tensors = {{"norm", Tensor::from<Bfloat16>({2}, {{0x3f80}, {0xc000}})}},
                     .blocks = {{kPrefix, whole_->weights(), alone, 0}}});
  }

  std::filesystem::path path() const { return folder_ / "x"; }
  Checkpoint open() const { return Checkpoint::open(path()); }
  std::string error(const MoeViews& into) const {
    return error_of<InvalidArgument>([&] { load_block(open(), kPrefix, placement_, 1, into); });
  }
  std::string has(const std::string& words) const { return path().string() + " has " + words; }

  const Folder folder_;
  const ExpertPlacement placement_ = ExpertPlacement::contiguous(6, 2);
  std::optional<MoeParameters> whole_;
};

TEST_F(CheckpointLoad, Bf16BecomesF32) {
  auto options = tiny_layer_options();
  options.dtype = Dtype::bf16;
  save(options);
  options.dtype = Dtype::f32;
  MoeParameters wide(options, placement_, 1);
  load_block(open(), kPrefix, placement_, 1, wide.views());
  const auto loaded = wide.views().experts[1].down.span<float>();
  const auto saved = whole_->weights().experts[4].down.span<Bfloat16>();
  for (std::size_t i = 0; i < saved.size(); ++i) EXPECT_EQ(loaded[i], to_float(saved[i]));

  Tensor norm({2}, Dtype::f32);
  load_tensor(open(), "norm", norm);
  EXPECT_TRUE(same_bits(norm, Tensor::from<float>({2}, {1.0F, -2.0F})));
}

TEST_F(CheckpointLoad, F32DoesNotBecomeBf16) {
  auto options = tiny_layer_options();
  save(options);
  options.dtype = Dtype::bf16;
  MoeParameters narrow(options, placement_, 1);
  EXPECT_EQ(error(narrow.views()), "mlp.gate.weight of " + path().string() +
                                       " is f32 [6,6], which cannot be loaded into bf16 [6,6]");
}

// Into every second row, with what lies between untouched.
TEST_F(CheckpointLoad, RowsMayBeStrided) {
  const auto options = tiny_layer_options();
  save(options);
  MoeParameters part(options, placement_, 1);
  auto into = part.views();
  Tensor wide = Tensor::zeros({4, 12}, Dtype::f32);
  into.experts[1].up = TensorView(wide.data(), Dtype::f32, {4, 6}, 12);
  load_block(open(), kPrefix, placement_, 1, into);
  const auto expected = whole_->weights().experts[4].up.span<float>();
  for (std::size_t i = 0; i < 48; ++i) {
    EXPECT_EQ(wide.span<float>()[i], i % 12 < 6 ? expected[i / 12 * 6 + i % 12] : 0.0F);
  }
}

TEST_F(CheckpointLoad, TensorsWithoutACounterpartAreAnError) {
  auto options = tiny_layer_options();
  options.shared_intermediate = 5;
  save(options);
  EXPECT_EQ(error(MoeParameters(options, placement_, 1, Biases::all).views()),
            has("no mlp.gate.bias"));
  MoeParameters part(options, placement_, 1);
  auto into = part.views();
  into.experts[2].down_bias = Tensor({6}, Dtype::f32).view();
  EXPECT_EQ(error(into), has("no mlp.experts.5.down_proj.bias"));
  into = part.views();
  into.shared = {};
  EXPECT_EQ(error(into), has("mlp.shared_experts.gate_proj.weight [5,6], but there is nothing to "
                             "load it into"));
  into = part.views();
  into.experts[0].gate = {};
  EXPECT_EQ(error(into), has("mlp.experts.3.gate_proj.weight [4,6], but there is nothing to load "
                             "it into"));
  into = part.views();
  into.experts.pop_back();
  EXPECT_EQ(error(into), "there are 2 experts to load into, but rank 1 owns 3");
}

TEST_F(CheckpointLoad, AGpusMemoryIsNotWritten) {
  const auto options = tiny_layer_options();
  save(options);
  const std::string rest = testing::kGivenToTheCpu;
  MoeParameters part(options, placement_, 1);
  auto views = part.views();
  views.experts[1].down = elsewhere(views.experts[1].down);
  EXPECT_EQ(error(views), "mlp.experts.4.down_proj.weight [6,4]" + rest);
  EXPECT_TRUE(same_bits(views.router.gate, Tensor::zeros({6, 6}, Dtype::f32)));
  Tensor norm({2}, Dtype::bf16);
  EXPECT_EQ(error_of<InvalidArgument>([&] { load_tensor(open(), "norm", elsewhere(norm)); }),
            "norm [2]" + rest);
}

// All is checked before anything is written.
TEST_F(CheckpointLoad, WhatDoesNotFitIsNamedAndNothingChanges) {
  auto options = tiny_layer_options();
  save(options);
  options.intermediate = 5;
  MoeParameters other(options, placement_, 1);
  EXPECT_EQ(error(other.views()), "mlp.experts.3.gate_proj.weight of " + path().string() +
                                      " is f32 [4,6], which cannot be loaded into f32 [5,6]");
  EXPECT_TRUE(same_bits(other.views().router.gate, Tensor::zeros({6, 6}, Dtype::f32)));
  const auto missing = error_of<InvalidArgument>(
      [&] { load_block(open(), "layers.0.", placement_, 1, other.views()); });
  EXPECT_EQ(missing, "there is no tensor layers.0.gate.weight or layers.0.router.weight");
  Tensor norm({3}, Dtype::bf16);
  EXPECT_EQ(error_of<InvalidArgument>([&] { load_tensor(open(), "norm", norm); }),
            "norm of " + path().string() + " is bf16 [2], which cannot be loaded into bf16 [3]");
  Tensor ids({2}, Dtype::i32);
  EXPECT_EQ(error_of<InvalidArgument>([&] { load_tensor(open(), "norm", ids); }),
            "norm of " + path().string() + " is bf16 [2], which cannot be loaded into i32 [2]");
}

// The bytes of a file's mappings that this process has touched.
std::int64_t resident_bytes(const std::filesystem::path& path) {
  std::ifstream maps("/proc/self/smaps");
  std::int64_t total = 0;
  bool is_ours = false;
  for (std::string line; std::getline(maps, line);) {
    const bool begins = line.find('-') < line.find(' ') && line.find(':') > line.find(' ');
    if (begins) is_ours = line.ends_with(path.string());
    if (is_ours && line.starts_with("Rss:")) total += 1024 * std::stoll(line.substr(4));
  }
  return total;
}

// The bytes that this process has read from files so far.
std::int64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::int64_t bytes = 0;
  io >> name >> bytes;
  EXPECT_EQ(name, "rchar:");
  return bytes;
}

TEST_F(CheckpointLoad, ReadsOnlyTheRanksPart) {
  auto options = tiny_layer_options();
  options.hidden = 512;
  options.intermediate = 1024;  // 6 MiB an expert
  save(options);
  const auto expert_bytes = std::int64_t{3} * 512 * 1024 * 4;
  constexpr std::int64_t kAround = 4 << 20;  // the file has 36 MiB
  for (const int num_ranks : {6, 2}) {
    const auto placement = ExpertPlacement::contiguous(6, num_ranks);
    MoeParameters part(options, placement, 1);
    const auto checkpoint = open();
    EXPECT_LT(resident_bytes(path()), kAround);
    const auto before = bytes_read();
    load_block(checkpoint, kPrefix, placement, 1, part.views());
    const auto read = bytes_read() - before;
    const auto own = 6 / num_ranks * expert_bytes;
    EXPECT_GE(read, own);
    EXPECT_LT(read, own + kAround);
    EXPECT_LT(resident_bytes(path()), kAround) << "nothing is touched that could be gone";
  }
}

}  // namespace
}  // namespace switchyard::testing::checkpoint_load_test
