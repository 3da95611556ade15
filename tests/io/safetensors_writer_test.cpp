// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_writer.h"

#include <gtest/gtest.h>

#include "io/file_writer.h"
#include "support/compare.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/random.h"
#include "switchyard/convert.h"
#include "switchyard/error.h"
#include "switchyard/safetensors.h"

namespace switchyard::safetensors_writer_test {
namespace {

using testing::error_of;
using testing::same_bits;
using Forms = std::map<std::string, TensorForm>;
using Metadata = std::map<std::string, std::string>;

std::map<std::string, TensorForm> forms_of(const NamedTensors& tensors) {
  Forms forms;
  for (const auto& [name, view] : tensors) forms[name] = form_of(view);
  return forms;
}

SafetensorsFile written(const std::filesystem::path& path, const NamedTensors& tensors,
                        const Metadata& metadata) {
  const auto layout = lay_out(forms_of(tensors), metadata);
  const auto file = FileWriter::create(path, path.string());
  file.reserve(layout.bytes);
  file.write(std::as_bytes(std::span(layout.head)), 0);
  for (const auto& [name, view] : tensors) file.write(view, layout.offsets.at(name));
  EXPECT_EQ(std::filesystem::file_size(path), static_cast<std::uintmax_t>(layout.bytes));
  return SafetensorsFile::open(path);
}

NamedTensors every_dtype() {
  testing::Random random(3);
  return {{"a", random.tensor({3, 5}, Dtype::bf16)},
          {"b", random.tensor({7}, Dtype::f32)},
          {"c", Tensor::from<std::int64_t>({1, 1, 1, 2}, {-1, std::int64_t{1} << 60})},
          {"d", Tensor::from<std::int32_t>({3}, {1, -2, 3})},
          {"empty", Tensor({4, 0, 2}, Dtype::bf16)},
          {"none", Tensor({0}, Dtype::i64)}};
}

TEST(SafetensorsWriter, EveryDtypeAndMetadataAreReadBack) {
  const testing::Folder folder;
  const auto tensors = every_dtype();
  const Metadata metadata{{"format", "pt"}, {"", "\"\\\n\t\x01/"}, {"é 学", "\U0001f600"}};
  const auto file = written(folder / "x", tensors, metadata);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, view] : tensors) EXPECT_TRUE(same_bits(file.tensor(name), view)) << name;
}

TEST(SafetensorsWriter, TensorsAreAlignedWhateverTheHeaderIs) {
  for (std::size_t length = 0; length < 70; ++length) {
    const Forms forms{{"a" + std::string(length, 'x'), {Dtype::bf16, {3}}},
                      {"b", {Dtype::i64, {1}}},
                      {"c", {Dtype::f32, {3}}},
                      {"d", {Dtype::f32, {1}}}};
    const auto layout = lay_out(forms, {});
    EXPECT_EQ(layout.head.size() % 64, 0U);
    const auto begin = static_cast<std::int64_t>(layout.head.size());
    EXPECT_EQ(layout.offsets.at("b"), begin);
    EXPECT_EQ(layout.offsets.at("c"), begin + 8);
    EXPECT_EQ(layout.offsets.at("d"), begin + 20);
    EXPECT_EQ(layout.offsets.at("a" + std::string(length, 'x')), begin + 24);
    EXPECT_EQ(layout.bytes, begin + 30);
  }
}

TEST(SafetensorsWriter, AFileMayHaveNoTensors) {
  const testing::Folder folder;
  EXPECT_TRUE(written(folder / "x", {}, {}).names().empty());
  EXPECT_EQ(std::filesystem::file_size(folder / "x"), 64U);
}

TEST(SafetensorsWriter, RefusesNamesThatAFileCannotHave) {
  const auto error = [](const std::string& name) {
    return error_of<InvalidArgument>([&] { lay_out({{name, {}}}, {}); });
  };
  EXPECT_EQ(error("__metadata__"), "a tensor must not be named __metadata__");
  EXPECT_EQ(error("a\xff"), "the tensor's name 'a\ufffd' is not UTF-8");
  EXPECT_EQ(error(std::string("é\0\n", 4)), "no error");
}

TEST(SafetensorsWriter, RefusesMetadataThatAFileCannotHave) {
  const auto error = [](const Metadata& metadata) {
    return error_of<InvalidArgument>([&] { lay_out({}, metadata); });
  };
  EXPECT_EQ(error({{"\xc3", ""}}), "the metadata's key '\ufffd' is not UTF-8");
  EXPECT_EQ(error({{"a", "b\xc3"}}), "the metadata's 'a' is 'b\ufffd', which is not UTF-8");
  EXPECT_EQ(error({{"a", std::string(100'000'000, 'x')}}),
            "the header of 0 tensors would have 100000056 bytes, but the limit is 100000000");
}

}  // namespace
}  // namespace switchyard::safetensors_writer_test
