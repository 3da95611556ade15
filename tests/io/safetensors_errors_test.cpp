// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "support/checkpoint/safetensors_files.h"

namespace switchyard::safetensors_errors_test {
namespace {

namespace fs = std::filesystem;
using testing::bytes_of;
using testing::file_of;
using testing::one_tensor;
using testing::replace_all;

class SafetensorsErrors : public testing::SafetensorsFiles {};

TEST_F(SafetensorsErrors, NamesWhatCannotBeOpened) {
  EXPECT_EQ(open_error(path_), "cannot open FILE: No such file or directory");
  EXPECT_EQ(open_error(directory_), "FILE is not a regular file");
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(open_error(directory_ / "pipe"), "FILE is not a regular file");
  const fs::path unmappable = "/sys/devices/system/cpu/online";  // Linux gives it a size
  EXPECT_EQ(open_error(unmappable), "cannot map the " + std::to_string(fs::file_size(unmappable)) +
                                        " bytes of FILE: No such device");
}

TEST_F(SafetensorsErrors, RejectsLengthsThatDoNotFit) {
  EXPECT_EQ(raw_error(""), "FILE has 0 bytes, but a safetensors file begins with a length of 8");
  EXPECT_EQ(raw_error("1234567"),
            "FILE has 7 bytes, but a safetensors file begins with a length of 8");
  EXPECT_EQ(raw_error(file_of("{}", "").substr(0, 9)),
            "FILE: the header's length (2) exceeds the 1 bytes that follow");
  EXPECT_EQ(raw_error(std::string(8, '\xff') + "{}"),
            "FILE: the header's length (18446744073709551615) exceeds the 2 bytes that follow");
  write(bytes_of<std::uint64_t>({100'000'001}));
  fs::resize_file(path_, 100'000'009);  // a hole: no memory, no disk
  EXPECT_EQ(open_error(path_),
            "FILE: the header's length (100000001) exceeds the limit of 100000000");
}

TEST_F(SafetensorsErrors, RejectsHeadersThatAreNotJson) {
  EXPECT_EQ(error(""), "FILE: the header is not valid JSON from its byte 1 on");
  EXPECT_EQ(error("{]"), "FILE: the header is not valid JSON from its byte 2 on");
  EXPECT_EQ(error("{} {}"), "FILE: the header is not valid JSON from its byte 4 on");
  EXPECT_EQ(error({"{}\0x", 4}), "FILE: the header is not valid JSON from its byte 3 on");
  EXPECT_EQ(error("{\"\xff\":1}"), "FILE: the header is not valid JSON from its byte 3 on");
  EXPECT_EQ(error("3"), "FILE: the header must be an object, not 3");
}

TEST_F(SafetensorsErrors, RejectsDeepNestingWhereItBegins) {
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(error(deep), "FILE: the header must be an object, not an array");
  EXPECT_EQ(error(R"({"w":)" + deep), "FILE: tensor 'w' must be an object, not an array");
  EXPECT_EQ(error(R"({"w":{"dtype":)" + deep),
            "FILE: dtype of tensor 'w' must be a string, not an array");
  EXPECT_EQ(error(R"({"w":{"shape":)" + deep),
            "FILE: shape of tensor 'w' must be integers from 0 to 2^63 - 1, not an array");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"w":)";
  EXPECT_EQ(error(R"({"w":{"shape":)" + objects),
            "FILE: shape of tensor 'w' must be an array, not an object");
}

TEST_F(SafetensorsErrors, RejectsFieldsOfAnotherType) {
  EXPECT_EQ(error(R"({"w":null})"), "FILE: tensor 'w' must be an object, not null");
  EXPECT_EQ(error(R"({"__metadata__":"x"})"), "FILE: __metadata__ must be an object, not a string");
  EXPECT_EQ(error(R"({"__metadata__":{"a":true}})"),
            "FILE: 'a' of __metadata__ must be a string, not true");
  EXPECT_EQ(error(one_tensor(R"("dtype":1)")), "FILE: dtype of tensor 'w' must be a string, not 1");
  EXPECT_EQ(error(one_tensor(R"("shape":"1")")),
            "FILE: shape of tensor 'w' must be an array, not a string");
  for (const std::string number : {"-1", "1.5", "9223372036854775808", "18446744073709551616"}) {
    for (const std::string field : {"shape", "data_offsets"}) {
      EXPECT_EQ(
          error(one_tensor("\"" + field + "\":[" + number + "]")),
          "FILE: " + field + " of tensor 'w' must be integers from 0 to 2^63 - 1, not " + number);
    }
  }
}

TEST_F(SafetensorsErrors, RejectsFieldsThatAreMissingTwiceOrTooMany) {
  EXPECT_EQ(error(one_tensor(R"("shape":[],"data_offsets":[0,4])")),
            "FILE: tensor 'w' has no dtype");
  EXPECT_EQ(error(one_tensor(R"("dtype":"F32","data_offsets":[0,4])")),
            "FILE: tensor 'w' has no shape");
  EXPECT_EQ(error(one_tensor(R"("dtype":"F32","shape":[])")),
            "FILE: tensor 'w' has no data_offsets");
  EXPECT_EQ(error(one_tensor(R"("stride":[1])")),
            "FILE: tensor 'w' has 'stride', but only dtype, shape and data_offsets are allowed");
  for (const std::string field : {R"("dtype":"F32")", R"("shape":[])", R"("data_offsets":[])"}) {
    EXPECT_EQ(error(one_tensor(field + "," + field)),
              "FILE: tensor 'w' has " + field.substr(1, field.find(':') - 2) + " twice");
  }
  const std::string w = R"("w":{"dtype":"F32","shape":[],"data_offsets":[0,4]})";
  EXPECT_EQ(error("{" + w + "," + w + "}"), "FILE: the header has 'w' twice");
  EXPECT_EQ(error(R"({"__metadata__":{},"__metadata__":{}})"),
            "FILE: the header has '__metadata__' twice");
  EXPECT_EQ(error(R"({"__metadata__":{"a":"1","a":"2"}})"), "FILE: __metadata__ has 'a' twice");
}

TEST_F(SafetensorsErrors, ShortensAbsurdNamesAndEscapesControls) {
  EXPECT_EQ(error(R"({"x)" + replace_all(std::string(100, 'y'), "y", "é") + R"(":1})"),
            "FILE: tensor 'x" + replace_all(std::string(63, 'y'), "y", "é") +
                "…' must be an object, not 1");
  EXPECT_EQ(error(R"({"\u001b[2J\u007f":1})"),
            R"(FILE: tensor '\x1b[2J\x7f' must be an object, not 1)");
}

TEST_F(SafetensorsErrors, RejectsShapesAndOffsetsThatDoNotFit) {
  const auto f32 = [&](const std::string& shape, const std::string& offsets) {
    return error(
        one_tensor(R"("dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]"),
        8);
  };
  EXPECT_EQ(f32("2", "0,4,8"),
            "FILE: data_offsets of tensor 'w' must be [begin, end], not [0, 4, 8]");
  EXPECT_EQ(f32("2", "0,9"),
            "FILE: tensor 'w' has data_offsets [0, 9], which is not a range within 8 bytes");
  EXPECT_EQ(f32("2", "8,0"),
            "FILE: tensor 'w' has data_offsets [8, 0], which is not a range within 8 bytes");
  EXPECT_EQ(f32("3", "0,8"), "FILE: tensor 'w' has 8 bytes, but F32 of shape [3] is 12");
  EXPECT_EQ(f32("2,0", "0,8"), "FILE: tensor 'w' has 8 bytes, but F32 of shape [2, 0] is 0");
  const std::string big = "4294967296";  // 2^32: its square is 0 in 64 bits
  EXPECT_EQ(f32(big + "," + big, "0,0"),
            "FILE: tensor 'w' of shape [4294967296, 4294967296] has "
            "too many elements to address");
  EXPECT_EQ(f32("0," + big + "," + big, "0,0"),
            "FILE: tensor 'w' of shape [0, 4294967296, 4294967296] has too many elements to "
            "address");
  EXPECT_EQ(f32("1" + replace_all(std::string(64, 'x'), "x", ",1"), "0,4"),
            "FILE: tensor 'w' has more than 64 numbers in its shape");
}

TEST_F(SafetensorsErrors, RejectsTensorsThatAreNotBackToBack) {
  const auto two = [&](const std::string& first, const std::string& second) {
    return error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[)" + first +
                     R"(]},"b":{"dtype":"U8","shape":[4],"data_offsets":[)" + second + "]}}",
                 8);
  };
  EXPECT_EQ(two("4,8", "0,4"), "no error");
  EXPECT_EQ(two("0,4", "3,8"),
            "FILE: tensor 'b' begins at byte 3, within tensor 'a', which ends at 4");
  EXPECT_EQ(two("2,2", "0,8"),
            "FILE: tensor 'a' begins at byte 2, within tensor 'b', which ends at 8");
  EXPECT_EQ(two("0,4", "5,8"), "FILE: bytes 4 to 5, before tensor 'b', belong to no tensor");
  EXPECT_EQ(two("1,4", "4,8"), "FILE: bytes 0 to 1, before tensor 'a', belong to no tensor");
  EXPECT_EQ(two("0,4", "4,7"), "FILE: bytes 7 to 8, at the end, belong to no tensor");
  EXPECT_EQ(error("{}", 1), "FILE: bytes 0 to 1, at the end, belong to no tensor");
}

}  // namespace
}  // namespace switchyard::safetensors_errors_test
