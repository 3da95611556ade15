// SPDX-License-Identifier: Apache-2.0
// Loading blocks of files that save_checkpoint would not write.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "support/checkpoint/checkpoint_files.h"
#include "switchyard/checkpoint.h"

namespace switchyard::testing::checkpoint_load_files_test {
namespace {

namespace fs = std::filesystem;

// One expert of hidden and intermediate size 1.
FileTensors block() {
  return {{"m.experts.down_proj", zeros("F32", {1, 1, 1}, 4)},
          {"m.experts.gate_up_proj", zeros("F32", {1, 2, 1}, 4)},
          {"m.gate.weight", zeros("F32", {1, 1}, 4)}};
}

class CheckpointLoadFiles : public CheckpointFiles {
 protected:
  static void load(const fs::path& path) {
    const auto one = [] { return Tensor::zeros({1, 1}, Dtype::f32); };
    MoeViews into;
    into.router.gate = one();
    into.experts.push_back({.gate = one(), .up = one(), .down = one()});
    load_block(Checkpoint::open(path), "m.", ExpertPlacement::contiguous(1, 1), 0, into);
  }

  // Returns the error of loading the block with one tensor added or replaced, with FILE for the
  // path.
  template <typename Error>
  std::string load_error(const std::string& name, const FileTensor& tensor) const {
    auto tensors = block();
    tensors["m." + name] = tensor;
    const auto path = put("x.safetensors", file_of(tensors));
    return replace_all(error_of<Error>([&] { load(path); }), path.string(), "FILE");
  }
};

// Most memory that this process ever had, in KiB.
long peak_memory() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST_F(CheckpointLoadFiles, DoesNotCopyTheRestOfAnUnalignedFile) {
  constexpr std::size_t kOther = std::size_t{1} << 30;
  std::string header =
      R"({"m.gate.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},)"
      R"("m.experts.gate_up_proj":{"dtype":"F32","shape":[1,2,1],"data_offsets":[4,12]},)"
      R"("m.experts.down_proj":{"dtype":"F32","shape":[1,1,1],"data_offsets":[12,16]},)"
      R"("m.other":{"dtype":"F32","shape":[268435456],"data_offsets":[16,1073741840]}})";
  if (header.size() % 4 == 0) header += ' ';
  const auto path = put("x.safetensors", file_of(header, ""));
  fs::resize_file(path, 8 + header.size() + 16 + kOther);  // a hole: no disk
  const auto before = peak_memory();
  load(path);
  EXPECT_LT(peak_memory() - before, 64 << 10);
}

TEST_F(CheckpointLoadFiles, RefusesWhatItCannotRead) {
  EXPECT_EQ(load_error<Unsupported>("gate.e_score_correction_bias", zeros("F64", {1}, 8)),
            "FILE: tensor 'm.gate.e_score_correction_bias' is of dtype 'F64'; F32, BF16, F16, I32 "
            "and I64 can be read");
  EXPECT_EQ(load_error<Unsupported>("gate.weight", zeros("F8_E5M2", {1, 1}, 1)),
            "FILE: tensor 'm.gate.weight' is of dtype 'F8_E5M2'; F32, BF16, F16, I32 and I64 can "
            "be read");
  EXPECT_EQ(load_error<Unsupported>("experts.down_proj", zeros("F32", {1, 1, 1, 1, 1}, 4)),
            "FILE: tensor 'm.experts.down_proj' has 5 extents; up to 4 can be read");
}

// Also where views are taken of a file's tensors: what cannot be read is not what is missing.
TEST_F(CheckpointLoadFiles, ViewsOfWhatCannotBeReadAreRefused) {
  auto tensors = block();
  tensors["m.gate.bias"] = zeros("F64", {1}, 8);
  tensors["m.shared_expert.up_proj.weight"] = zeros("F32", {1, 1, 1, 1, 1}, 4);
  const auto path = put("x.safetensors", file_of(tensors));
  const auto error = [&](const NamedTensors& found) {
    const auto one = ExpertPlacement::contiguous(1, 1);
    return replace_all(error_of<Unsupported>([&] { from_hugging_face(found, "m.", one, 0); }),
                       path.string(), "FILE");
  };
  const std::string bias =
      "FILE: tensor 'm.gate.bias' is of dtype 'F64'; F32, BF16, F16, I32 and I64 can be read";
  auto found = SafetensorsFile::open(path).tensors();
  EXPECT_EQ(error(found), bias);
  EXPECT_EQ(error(Checkpoint::open(path).tensors()), bias);
  found.unreadable.erase("m.gate.bias");
  EXPECT_EQ(error(found),
            "FILE: tensor 'm.shared_expert.up_proj.weight' has 5 extents; up to 4 can be read");
}

TEST_F(CheckpointLoadFiles, TensorsOutsideTheBlockNeedNotBeReadable) {
  EXPECT_EQ(load_error<Error>("other", zeros("F64", {1}, 8)), "no error");
  EXPECT_EQ(load_error<Error>("experts.1.up_proj.weight", zeros("F64", {1}, 8)), "no error");
}

TEST_F(CheckpointLoadFiles, ASharedExpertIsCompleteOrAbsent) {
  EXPECT_EQ(load_error<InvalidArgument>("shared_experts.down_proj.weight", zeros("F32", {1, 1}, 4)),
            "there is m.shared_experts.down_proj.weight, but no up_proj.weight beside it");
  EXPECT_EQ(load_error<InvalidArgument>("shared_experts.gate_up_proj", zeros("F64", {1}, 8)),
            "there is m.shared_experts.gate_up_proj, but no up_proj.weight beside it");
  EXPECT_EQ(load_error<InvalidArgument>("shared_expert.down_proj.weight", zeros("F32", {1, 1}, 4)),
            "there is m.shared_expert.down_proj.weight, but no up_proj.weight beside it");
  auto tensors = block();
  tensors["m.shared_expert.up_proj.weight"] = zeros("F32", {1, 1}, 4);
  tensors["m.shared_expert.down_proj.weight"] = zeros("F32", {1, 1}, 4);
  const auto path = put("x.safetensors", file_of(tensors));
  EXPECT_EQ(replace_all(error_of<InvalidArgument>([&] { load(path); }), path.string(), "FILE"),
            "FILE has m.shared_expert.up_proj.weight [1,1], but there is nothing to load it into");
}

// Returns the error of loading a tensor of `dtype` after the file lost half of that tensor's bytes.
std::string error_of_shortened(const fs::path& path, const std::string& dtype, Dtype into) {
  const auto checkpoint = Checkpoint::open(path);
  fs::resize_file(path, fs::file_size(path) - 50'000);
  Tensor tensor({std::int64_t{100'000} / (dtype == "F32" ? 4 : 2)}, into);
  return replace_all(error_of<StorageError>([&] { load_tensor(checkpoint, "m.x", tensor); }),
                     path.string(), "FILE");
}

TEST_F(CheckpointLoadFiles, ATruncatedFileIsAnErrorAndNoFault) {
  for (const auto& [dtype, into] : {std::pair("F32", Dtype::f32), std::pair("BF16", Dtype::bf16),
                                    std::pair("BF16", Dtype::f32), std::pair("F16", Dtype::bf16)}) {
    const std::int64_t element = std::string(dtype) == "F32" ? 4 : 2;
    const auto tensor = zeros(dtype, {100'000 / element}, static_cast<std::size_t>(element));
    const auto path = put("x.safetensors", file_of({{"m.x", tensor}}));
    const auto bytes = fs::file_size(path);
    EXPECT_EQ(error_of_shortened(path, dtype, into),
              "FILE was truncated while it was being read: of its " + std::to_string(bytes) +
                  " bytes, " + std::to_string(bytes - 50'000) + " are left");
  }
}

TEST_F(CheckpointLoadFiles, ABlockOfATruncatedFileIsAnErrorAndNoFault) {
  auto tensors = block();
  const auto path = put("x.safetensors", file_of(tensors));
  const auto checkpoint = Checkpoint::open(path);
  fs::resize_file(path, fs::file_size(path) - 4);
  MoeViews into;
  const auto one = [] { return Tensor::zeros({1, 1}, Dtype::f32); };
  into.router.gate = one();
  into.experts.push_back({.gate = one(), .up = one(), .down = one()});
  EXPECT_NE(error_of<StorageError>([&] {
              load_block(checkpoint, "m.", ExpertPlacement::contiguous(1, 1), 0, into);
            }).find("was truncated while it was being read"),
            std::string::npos);
}

TEST_F(CheckpointLoadFiles, AnUnalignedTensorOfATruncatedFileIsAnErrorAndNoFault) {
  std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  if (header.size() % 4 == 0) header += ' ';
  const auto path = put("x.safetensors", file_of(header, std::string(8, 'a')));
  const auto file = SafetensorsFile::open(path);
  EXPECT_EQ(file.tensor("x").bytes(), 8);
  fs::resize_file(path, fs::file_size(path) - 1);
  EXPECT_NE(error_of<StorageError>([&] { file.tensor("x"); }).find("was truncated"),
            std::string::npos);
}

// A file by another name is no reason to read it: the one that was opened is still mapped.
TEST_F(CheckpointLoadFiles, AFileThatWasReplacedIsReadAsItWas) {
  const auto path = put("x.safetensors", file_of({{"x", {"F32", {1}, bytes_of({1.0F})}}}));
  const auto checkpoint = Checkpoint::open(path);
  put("x.safetensors", file_of({{"x", {"F32", {1}, bytes_of({2.0F})}}}));
  Tensor tensor = Tensor::zeros({1}, Dtype::f32);
  load_tensor(checkpoint, "x", tensor);
  EXPECT_EQ(tensor.span<float>()[0], 1.0F);
}

}  // namespace
}  // namespace switchyard::testing::checkpoint_load_files_test
