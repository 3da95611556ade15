// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are damaged, hostile or not there: each is an error that names what it is about.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "io/open_folder.h"
#include "support/checkpoint/checkpoint_files.h"
#include "switchyard/checkpoint.h"

namespace switchyard::checkpoint_open_errors_test {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::file_of;
using testing::replace_all;
using testing::zeros;

class CheckpointErrors : public testing::CheckpointFiles {
 protected:
  // The message, with the folder as DIR.
  std::string checkpoint_error(const fs::path& path) const {
    return replace_all(error_of<InvalidArgument>([&] { (void)Checkpoint::open(path); }),
                       directory_.string(), "DIR");
  }
  // Returns the error of opening an index beside a file "a" with a tensor "w", with INDEX for its
  // path.
  std::string index_error(const std::string& text) const {
    put("a", file_of({{"w", zeros("F32", {1}, 4)}}));
    const auto path = put("x.safetensors.index.json", text);
    return replace_all(checkpoint_error(path), "DIR/x.safetensors.index.json", "INDEX");
  }
  std::string map_error(const std::string& entries) const {
    return index_error(R"({"weight_map":{)" + entries + "}}");
  }
};

TEST_F(CheckpointErrors, NamesAMissingPath) {
  EXPECT_EQ(checkpoint_error(directory_ / "none"),
            "cannot open DIR/none: No such file or directory");
  EXPECT_EQ(checkpoint_error(directory_ / "none.json"),
            "cannot open DIR/none.json: No such file or directory");
  EXPECT_EQ(checkpoint_error(directory_),
            "DIR has neither an index (*.safetensors.index.json) nor a file *.safetensors");
  ASSERT_EQ(::mkfifo((directory_ / "pipe.json").c_str(), 0600), 0);
  EXPECT_EQ(checkpoint_error(directory_ / "pipe.json"), "DIR/pipe.json is not a regular file");
  put("a.safetensors", "");
  EXPECT_EQ(checkpoint_error(directory_),
            "DIR/a.safetensors has 0 bytes, but a safetensors file begins with a length of 8");
}

TEST_F(CheckpointErrors, NamesAFolderThatCannotBeOpened) {
  const auto gone = directory_ / "gone";
  EXPECT_EQ(error_of<InvalidArgument>([&] { const OpenFolder folder(gone); }),
            "cannot open the folder " + gone.string() + ": No such file or directory");
}

TEST_F(CheckpointErrors, FoldersMustNotBeAmbiguous) {
  const auto w = file_of({{"w", zeros("F32", {1}, 4)}});
  put("a.safetensors", w);
  put("b.safetensors", w);
  EXPECT_EQ(checkpoint_error(directory_),
            "tensor 'w' is in DIR/a.safetensors and in DIR/b.safetensors, and there is no index");
  put("a.safetensors.index.json", "");
  put("b.safetensors.index.json", "");
  EXPECT_EQ(checkpoint_error(directory_),
            "DIR has 2 indexes: 'a.safetensors.index.json', 'b.safetensors.index.json'; open one "
            "of them");
  for (char c = 'c'; c <= 'l'; ++c) put(std::string(1, c) + ".safetensors.index.json", "");
  EXPECT_NE(checkpoint_error(directory_).find("'h.safetensors.index.json', 4 more; open one"),
            std::string::npos);
}

TEST_F(CheckpointErrors, IndexesMustBeJsonObjectsOfTheRightForm) {
  EXPECT_EQ(index_error(""), "INDEX: the index is not valid JSON from its byte 1 on");
  EXPECT_EQ(index_error("{]"), "INDEX: the index is not valid JSON from its byte 2 on");
  EXPECT_EQ(index_error({"{}\0", 3}), "INDEX: the index is not valid JSON from its byte 3 on");
  EXPECT_EQ(index_error("[]"), "INDEX: the index must be an object, not an array");
  EXPECT_EQ(index_error("7"), "INDEX: the index must be an object, not 7");
  EXPECT_EQ(index_error("{}"), "INDEX: the index has no weight_map");
  EXPECT_EQ(index_error(R"({"weights":{}})"),
            "INDEX: the index has 'weights', but only metadata and weight_map are allowed");
  EXPECT_EQ(index_error(R"({"weight_map":{},"weight_map":{}})"),
            "INDEX: the index has weight_map twice");
  EXPECT_EQ(index_error(R"({"metadata":{},"metadata":{}})"), "INDEX: the index has metadata twice");
  EXPECT_EQ(index_error(R"({"weight_map":"a"})"),
            "INDEX: weight_map of the index must be an object, not a string");
  EXPECT_EQ(index_error(R"({"metadata":null})"),
            "INDEX: metadata of the index must be an object, not null");
}

TEST_F(CheckpointErrors, NestedValuesAreRefused) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(index_error(deep), "INDEX: the index must be an object, not an array");
  EXPECT_EQ(index_error(R"({"weight_map":)" + deep),
            "INDEX: weight_map of the index must be an object, not an array");
  EXPECT_EQ(index_error(R"({"weight_map":{"w":)" + deep),
            "INDEX: the file of tensor 'w' must be a string, not an array");
  EXPECT_EQ(index_error(R"({"weight_map":{"w":{)"),
            "INDEX: the file of tensor 'w' must be a string, not an object");
  EXPECT_EQ(index_error(R"({"metadata":{"a":)" + deep),
            "INDEX: 'a' of metadata must be a string, a number, a boolean or null, not an array");
  EXPECT_EQ(index_error(R"({"metadata":{"a":{)"),
            "INDEX: 'a' of metadata must be a string, a number, a boolean or null, not an object");
}

TEST_F(CheckpointErrors, EntriesMustBeUniqueAndOfTheRightType) {
  EXPECT_EQ(map_error(R"("w":"a")"), "no error");
  EXPECT_EQ(map_error(R"("w":"a","w":"a")"), "INDEX: weight_map of the index has 'w' twice");
  EXPECT_EQ(index_error(R"({"metadata":{"a":1,"a":1}})"),
            "INDEX: metadata of the index has 'a' twice");
  for (const std::string value : {"1", "-1", "1.5", "true", "false", "null"}) {
    EXPECT_EQ(map_error(R"("w":)" + value),
              "INDEX: the file of tensor 'w' must be a string, not " + value);
  }
}

TEST_F(CheckpointErrors, FilesMustBeBesideTheIndex) {
  for (const std::string name : {"", ".", "..", "/etc/passwd", "../a", "./a", "b/a", "a/"}) {
    EXPECT_EQ(
        map_error(R"("w":")" + name + "\""),
        "INDEX: the file of tensor 'w' must be the name of a file in the index's folder, not '" +
            name + "'");
  }
  EXPECT_EQ(
      map_error(R"("w":"a\u0000b")"),
      R"(INDEX: the file of tensor 'w' must be the name of a file in the index's folder, not 'a\x00b')");
}

TEST_F(CheckpointErrors, TensorsMustBeWhereTheIndexSays) {
  EXPECT_EQ(map_error(R"("v":"b","w":"a")"),
            "INDEX: there is no file 'b' beside it, where tensor 'v' should be");
  EXPECT_EQ(map_error(R"("w":")" + std::string(300, 'x') + "\""),
            "INDEX: there is no file '" + std::string(128, 'x') +
                "…' beside it, where tensor 'w' should be");
  EXPECT_EQ(map_error(R"("v":"a","w":"a")"),
            "INDEX: tensor 'v' should be in 'a', which has no such tensor");
  put("broken", "12345678");
  EXPECT_EQ(
      map_error(R"("v":"broken")"),
      "DIR/broken: the header's length (4050765991979987505) exceeds the 0 bytes that follow");
  fs::create_directory(directory_ / "folder");
  EXPECT_EQ(map_error(R"("v":"folder")"), "DIR/folder is not a regular file");
}

TEST_F(CheckpointErrors, IndexesHaveALimit) {
  const auto path = put("x.safetensors.index.json", "{");
  fs::resize_file(path, 100'000'001);  // a hole: no memory, no disk
  EXPECT_EQ(checkpoint_error(path),
            "DIR/x.safetensors.index.json has 100000001 bytes, more than the limit of 100000000 "
            "for an index");
}

TEST_F(CheckpointErrors, MissingAndUnreadableTensorsAreNamed) {
  const auto path = put("a.safetensors", file_of({{"w", zeros("F64", {1}, 8)}}));
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)checkpoint.tensor("v"); }),
            path.string() + " has no tensor 'v' among the 1 it contains");
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)checkpoint.file_of("v"); }),
            path.string() + " has no tensor 'v' among the 1 it contains");
  EXPECT_EQ(
      error_of<Unsupported>([&] { (void)checkpoint.tensor("w"); }),
      path.string() + ": tensor 'w' is of dtype 'F64'; F32, BF16, F16, I32 and I64 can be read");
}

}  // namespace
}  // namespace switchyard::checkpoint_open_errors_test
