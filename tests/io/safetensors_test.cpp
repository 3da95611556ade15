// SPDX-License-Identifier: Apache-2.0
#include "switchyard/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "support/checkpoint/safetensors_files.h"
#include "support/random.h"
#include "switchyard/error.h"

namespace switchyard::safetensors_test {
namespace {

namespace fs = std::filesystem;
using testing::bytes_of;
using testing::file_of;
using testing::one_tensor;
using Names = std::vector<std::string>;

class Safetensors : public testing::SafetensorsFiles {};

const std::string kEveryDtype =
    R"({"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
    R"("f":{"data_offsets":[4,28],"shape":[2,3],"dtype":"F32"},)"
    R"("i":{"dtype":"I32","shape":[1,1,1],"data_offsets":[28,32]},)"
    R"("__metadata__":{"format":"pt","é":"\n"},)"
    R"("l":{"dtype":"I64","shape":[],"data_offsets":[32,40]},)"
    R"("none":{"dtype":"F32","shape":[0,4],"data_offsets":[40,40]},)"
    R"("half":{"dtype":"F16","shape":[1],"data_offsets":[40,42]},)"
    R"("deep":{"dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[42,46]},)"
    R"("tiny":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[46,47]}})";
const std::string kEveryData = bytes_of<std::uint16_t>({0x3f80, 0xc000}) +
                               bytes_of<float>({1, 2, 3, 4, 5, 6}) + bytes_of<std::int32_t>({-7}) +
                               bytes_of<std::int64_t>({std::int64_t{1} << 40}) +
                               bytes_of<std::uint16_t>({0x3c01}) + std::string(5, 'x');

void expect_every_dtype(const SafetensorsFile& file) {
  EXPECT_EQ(file.tensor("b").span<Bfloat16>()[1].bits, 0xc000);
  const auto f = file.tensor("f");
  EXPECT_EQ(f.shape(), (Shape{2, 3}));
  EXPECT_EQ(std::vector<float>(f.span<float>().begin(), f.span<float>().end()),
            (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(file.tensor("i").span<std::int32_t>()[0], -7);
  EXPECT_EQ(file.tensor("l").shape(), Shape{1});
  EXPECT_EQ(file.tensor("l").span<std::int64_t>()[0], std::int64_t{1} << 40);
  EXPECT_EQ(file.tensor("none").shape(), (Shape{0, 4}));
  EXPECT_EQ(file.tensor("half").span<Float16>()[0].bits, 0x3c01);
}

// Aligned to its elements, whatever the header's length: tensors may lie anywhere in a file.
TEST_F(Safetensors, ReadsEveryDtypeAtEveryAlignment) {
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const auto file = open(kEveryDtype + std::string(padding, ' '), kEveryData);
    expect_every_dtype(file);
    for (const auto& [name, view] : file.tensors()) {
      const auto address = reinterpret_cast<std::uintptr_t>(view.data());
      EXPECT_EQ(address % static_cast<std::uintptr_t>(size_of(view.dtype())), 0U) << name;
    }
  }
}

TEST_F(Safetensors, ListsAllAndReadsWhatItCan) {
  const auto file = open(kEveryDtype, kEveryData);
  EXPECT_EQ(file.path(), path_);
  EXPECT_EQ(file.names(), (Names{"b", "deep", "f", "half", "i", "l", "none", "tiny"}));
  EXPECT_TRUE(file.contains("tiny"));
  EXPECT_FALSE(file.contains("__metadata__"));
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"é", "\n"}}));
  Names readable;
  for (const auto& [name, view] : file.tensors()) readable.push_back(name);
  EXPECT_EQ(readable, (Names{"b", "f", "half", "i", "l", "none"}));
  EXPECT_EQ(tensor_error<InvalidArgument>(file, "g"),
            "FILE has no tensor 'g' among the 8 it contains");
  EXPECT_EQ(tensor_error<Unsupported>(file, "tiny"),
            "FILE: tensor 'tiny' is of dtype 'F8_E4M3'; F32, BF16, F16, I32 and I64 can be read");
  EXPECT_EQ(tensor_error<Unsupported>(file, "deep"),
            "FILE: tensor 'deep' has 5 extents; up to 4 can be read");
}

void expect_info(const TensorInfo& info, const std::string& dtype,
                 const std::vector<std::int64_t>& shape, std::int64_t bytes, bool is_readable) {
  EXPECT_EQ(info.dtype, dtype);
  EXPECT_EQ(info.shape, shape);
  EXPECT_EQ(info.bytes, bytes);
  EXPECT_EQ(info.is_readable, is_readable);
}

TEST_F(Safetensors, SaysWhatEveryTensorIs) {
  const auto file = open(kEveryDtype, kEveryData);
  expect_info(file.info("b"), "BF16", {2}, 4, true);
  expect_info(file.info("l"), "I64", {}, 8, true);
  expect_info(file.info("none"), "F32", {0, 4}, 0, true);
  expect_info(file.info("half"), "F16", {1}, 2, true);
  expect_info(file.info("tiny"), "F8_E4M3", {1}, 1, false);
  expect_info(file.info("deep"), "F32", {1, 1, 1, 1, 1}, 4, false);
  EXPECT_EQ(testing::error_of<InvalidArgument>([&] { (void)file.info("g"); }),
            path_.string() + " has no tensor 'g' among the 8 it contains");
}

TEST_F(Safetensors, ReadsAFileOfNothing) {
  const auto file = open("{}", "");
  EXPECT_TRUE(file.names().empty());
  EXPECT_TRUE(file.metadata().empty());
  EXPECT_TRUE(open(R"({"__metadata__":{}}   )", "").tensors().empty());
}

TEST_F(Safetensors, ViewsOutliveTheFile) {
  for (const auto* padding : {"", " ", "  ", "   "}) {  // mapped once, copied three times
    ConstTensorView view;
    {
      const auto file =
          open(one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])") + padding,
               bytes_of<float>({7}));
      view = file.tensor("w");
    }
    fs::remove(path_);
    EXPECT_EQ(view.span<float>()[0], 7.0F);
  }
}

// One to three bytes changed, half of them to what headers are made of; some files cut short.
std::string mutate(std::string bytes, testing::Random& random) {
  constexpr std::string_view kAlphabet = "{}[]\":,.-e0123456789FIB \\";
  for (std::int64_t i = random.below(3); i >= 0; --i) {
    const auto at = random.below(static_cast<std::int64_t>(bytes.size()));
    const auto pick = random.below(static_cast<std::int64_t>(kAlphabet.size()));
    bytes[static_cast<std::size_t>(at)] = random.below(2) == 0
                                              ? kAlphabet[static_cast<std::size_t>(pick)]
                                              : static_cast<char>(random.below(256));
  }
  if (random.below(8) == 0) {
    bytes.resize(static_cast<std::size_t>(random.below(static_cast<std::int64_t>(bytes.size()))));
  }
  return bytes;
}

TEST_F(Safetensors, MutatedFilesAreReadOrRejected) {
  testing::Random random(17);
  const std::string valid = file_of(kEveryDtype, kEveryData);
  int num_opened = 0;
  std::uint64_t sum = 0;  // so that every byte is read
  for (int i = 0; i < 5000; ++i) {
    write(mutate(valid, random));
    try {
      const auto file = SafetensorsFile::open(path_);
      ++num_opened;
      for (const auto& [name, view] : file.tensors()) {
        const std::span bytes(view.data(), static_cast<std::size_t>(view.bytes()));
        for (const auto byte : bytes) sum += std::to_integer<std::uint64_t>(byte);
      }
      for (const auto& name : file.names()) (void)file.tensor(name);
    } catch (const Error&) {
      continue;
    }
  }
  EXPECT_GT(num_opened, 100);
  EXPECT_LT(num_opened, 2500);
  EXPECT_GT(sum, 0U);
}

}  // namespace
}  // namespace switchyard::safetensors_test
