// SPDX-License-Identifier: Apache-2.0
// switchyard inspect: files made to cost memory, or to write to the terminal.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

#include "cli/inspect_files.h"

namespace switchyard::inspect_hostile_test {
namespace {

using testing::about;
using testing::expect_says;
using testing::file_of;
using testing::FileTensors;
using testing::run;
using testing::zeros;

// The address sanitizer keeps some bytes about those that are touched, and memory that was freed.
#ifdef SWITCHYARD_SANITIZED
constexpr int kMemoryFactor = 2;
constexpr int kSizes = 1000;
constexpr int kRanks = 800;
#else
constexpr int kMemoryFactor = 1;
constexpr int kSizes = 10000;
constexpr int kRanks = 8000;
#endif

class InspectHostile : public testing::InspectFiles {
 protected:
  // The most that any command of this process has taken.
  static std::int64_t peak_bytes() {
    rusage usage{};
    ::getrusage(RUSAGE_CHILDREN, &usage);
    return std::int64_t{usage.ru_maxrss} * 1024;
  }
  static constexpr std::int64_t kMostBytes = std::int64_t{kMemoryFactor} << 30;
};

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

// Each block's experts would be those of all blocks within it as well.
TEST_F(InspectHostile, BlocksWithinBlocks) {
  constexpr int kDepth = 700;
  FileTensors packed;
  FileTensors separate;
  for (int k = 0; k < kDepth; ++k) {
    const auto outer = repeated("experts.", k);
    packed[outer + "gate.weight"] = zeros("F32", {1, 0}, 4);
    packed[outer + "experts.gate_up_proj"] = zeros("F32", {1, 0, 0}, 4);
    const auto of_expert = repeated("experts.0.", k);
    separate[of_expert + "gate.weight"] = zeros("F32", {1, 0}, 4);
    separate[of_expert + "experts.0.up_proj.weight"] = zeros("F32", {1, 0}, 4);
  }
  for (const auto& tensors : {packed, separate}) {
    const auto outcome = run(shell(put("a.safetensors", file_of(tensors))) + "--json --all");
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(about("block", outcome).size(), std::size_t{kDepth});
    EXPECT_LT(peak_bytes(), kMostBytes);
  }
}

TEST_F(InspectHostile, ManySizesForManyRanks) {
  FileTensors tensors;
  for (int e = 1; e <= kSizes; ++e) {
    const auto prefix = "b" + std::to_string(e) + ".";
    tensors[prefix + "gate.weight"] = zeros("F32", {e, 0}, 4);
    tensors[prefix + "experts.gate_up_proj"] = zeros("F32", {e, 0, 0}, 4);
    tensors[prefix + "experts.down_proj"] = zeros("F32", {e, 0, 0}, 4);
  }
  const auto path = put("a.safetensors", file_of(tensors));
  const auto ranks = about("rank", run(shell(path) + "--json --ranks " + std::to_string(kRanks)));
  ASSERT_EQ(ranks.size(), std::size_t{kRanks});
  EXPECT_EQ(ranks[0].at("experts").size(), 64U);
  EXPECT_EQ(ranks[0].at("sizes_not_listed"), kSizes - 64);
  expect_says(run(shell(path) + "--ranks 2"),
              {"32…63 of 64, and of " + std::to_string(kSizes - 64) + " other sizes\n"});
  EXPECT_LT(peak_bytes(), kMostBytes);
}

// A header of the largest size, of nothing but names.
TEST_F(InspectHostile, MoreTensorsThanCanBeListed) {
  std::string header = "{";
  int count = 0;
  for (; header.size() < 93'000'000; ++count) {
    header += (count > 0 ? ",\"t" : "\"t") + std::to_string(count) +
              R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  }
  const auto path = put("a.safetensors", testing::file_of(header + "}", ""));
  const auto outcome = run(shell(path));
  EXPECT_EQ(outcome.status, 1);
  expect_says(outcome, {"has " + std::to_string(count) + " tensors, and at most 500000 can be"});
  EXPECT_LT(peak_bytes(), kMostBytes * 3 / 4);
}

TEST_F(InspectHostile, ManyBlocksThatAreNotWhole) {
  FileTensors tensors;
  for (int i = 0; i < 100; ++i) {
    const auto prefix = "b" + std::to_string(i) + ".";
    tensors[prefix + "gate.weight"] = zeros("F32", {2, 0}, 4);
    tensors[prefix + "experts.gate_up_proj"] = zeros("F32", {1, 0, 0}, 4);
  }
  const auto path = put("a.safetensors", file_of(tensors));
  const auto rank = about("rank", run(shell(path) + "--json --ranks 2")).at(1);
  EXPECT_EQ(rank.at("not_counted").size(), 64U);
  EXPECT_EQ(rank.at("not_counted_not_listed"), 36);
}

TEST_F(InspectHostile, ALongNameOfDots) {
  const std::string name(10'000'000, '.');
  const auto path = put("a.safetensors", file_of({{name, zeros("F32", {0}, 4)}}));
  EXPECT_EQ(names("tensor", path), std::vector{name});
  EXPECT_LT(peak_bytes(), kMostBytes);
}

// C1 controls, and characters that turn the direction of text.
TEST_F(InspectHostile, NamesDoNotReachTheTerminalUnescaped) {
  const auto path =
      put("a.safetensors",
          file_of({{"a\u009b2Jb\u202ec\u2066dü", zeros("F32", {1}, 4)}}, {{"\u0085k", "v\u2069"}}));
  expect_says(run(shell(path)), {"a?2Jb?c?dü ", "?k: v?\n"});
}

TEST_F(InspectHostile, PathsInErrorsDoNotReachTheTerminalUnescaped) {
  put("a\u009b\x1b[2J.safetensors", "short");
  const auto outcome = run(shell(directory_));
  EXPECT_EQ(outcome.status, 1);
  expect_says(outcome, {"a??[2J.safetensors has 5 bytes"});
}

}  // namespace
}  // namespace switchyard::inspect_hostile_test
