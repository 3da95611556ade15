// SPDX-License-Identifier: Apache-2.0
// switchyard verify: what it finds wrong, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.h"

namespace switchyard::verify_test {
namespace {

namespace fs = std::filesystem;
using testing::lines_of;
using testing::Outcome;
using testing::run;

std::string golden(const std::string& name) {
  return std::string(SWITCHYARD_GOLDEN) + "/" + name + ".safetensors";
}

bool says(const Outcome& outcome, const std::string& text) {
  return outcome.output.find(text) != std::string::npos;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A folder for cases that were tampered with.
class Verify : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "switchyard-verify-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& bytes, const std::string& name = "changed") const {
    const auto path = folder_ / (name + ".safetensors");
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }

  // The recorded case with its description changed; lengths must agree, or the file breaks.
  std::string with_text(const std::string& name, const std::string& from,
                        const std::string& to) const {
    auto bytes = bytes_of(golden(name));
    EXPECT_EQ(from.size(), to.size());
    bytes.replace(bytes.find(from), from.size(), to);
    return write(bytes);
  }

  // The recorded case with the first element of a tensor replaced.
  template <typename T>
  std::string with_value(const std::string& name, const std::string& tensor, T value) const {
    auto bytes = bytes_of(golden(name));
    std::size_t header_bytes = 0;
    for (std::size_t i = 8; i-- > 0;) {
      header_bytes = header_bytes * 256 + static_cast<unsigned char>(bytes[i]);
    }
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    const auto at = header.at(tensor).at("data_offsets").at(0).get<std::size_t>();
    bytes.replace(8 + header_bytes + at, sizeof(T), reinterpret_cast<const char*>(&value),
                  sizeof(T));
    return write(bytes);
  }

  fs::path folder_;
};

TEST_F(Verify, EveryTensorIsCompared) {
  for (const std::string tensor :
       {"routing_weights", "expert_counts", "y", "dx", "d.gate_w", "d.up_w", "d.down_w",
        "d.router.gate.weight", "d.shared_expert.gate_proj.weight",
        "d.shared_expert.up_proj.weight", "d.shared_expert.down_proj.weight"}) {
    for (const float value : {1e3F, NAN, INFINITY}) {
      const auto outcome = run("verify " + with_value("ep2_shared", "rank1." + tensor, value));
      EXPECT_EQ(outcome.status, 1) << tensor;
      EXPECT_TRUE(says(outcome, "FAILED on rank 1")) << tensor << outcome.output;
      EXPECT_TRUE(says(outcome, "Cases passed: 0, failed: 1")) << tensor << outcome.output;
    }
  }
  for (const std::string tensor : {"d.router.expert_bias", "expert_bias_after"}) {
    const auto outcome = run("verify " + with_value("ep4_sigmoid", "rank2." + tensor, 1e3F));
    EXPECT_EQ(outcome.status, 1) << tensor;
    EXPECT_TRUE(says(outcome, "FAILED on rank 2")) << tensor << outcome.output;
  }
  const auto ids = run("verify " + with_value("ep2", "rank0.expert_ids", std::int64_t{7}));
  EXPECT_EQ(ids.status, 1);
  EXPECT_TRUE(says(ids, "1 differ  FAILED on rank 0")) << ids.output;
  for (const std::string tensor :
       {"y", "dx", "d.gate.weight", "d.experts.gate_up_proj", "d.experts.down_proj",
        "d.shared_experts.gate_proj.weight", "d.shared_experts.up_proj.weight",
        "d.shared_experts.down_proj.weight"}) {
    const auto outcome = run("verify " + with_value("hf_deepseek_v3", tensor, 1e3F));
    EXPECT_EQ(outcome.status, 1) << tensor;
    EXPECT_TRUE(says(outcome, "FAILED")) << tensor << outcome.output;
  }
}

TEST_F(Verify, JsonHasAnObjectATensorAndASummary) {
  const auto outcome = run("verify --json --ranks 3 " + golden("local") + " " +
                           golden("local_capacity") + " " + golden("hf_olmoe"));
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const auto lines = lines_of(outcome);
  ASSERT_EQ(lines.size(), 11U + 11U + 3U * 5U + 1U);
  EXPECT_EQ(lines[0].at("case"), "local");
  EXPECT_EQ(lines[0].at("ranks"), 1);
  EXPECT_EQ(lines[0].at("tensor"), "expert_ids");
  EXPECT_EQ(lines[0].at("ok"), true);
  EXPECT_LE(lines[3].at("relative_error").get<double>(), 1e-5);
  EXPECT_EQ(lines[11].at("case"), "local_capacity");
  EXPECT_EQ(lines[22].at("ranks"), 3);
  EXPECT_EQ(lines.back().at("passed"), 3);
  EXPECT_EQ(lines.back().at("failed"), 0);
  EXPECT_EQ(lines.back().at("skipped"), 0);
  EXPECT_EQ(lines.back().at("runs"), 5);
}

TEST_F(Verify, AnErrorOfTheLayerFailsTheCaseAndTheOthersGoOn) {
  const auto changed = with_text("ep2", R"(\"dim\": 16)", R"(\"dim\": 17)");
  const auto outcome = run("verify " + changed + " " + golden("ep2_relu"));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(says(outcome, "x is f32 [29,16], but must be f32 [T,17]")) << outcome.output;
  EXPECT_TRUE(says(outcome, "Cases passed: 1, failed: 1")) << outcome.output;
  const auto lines = lines_of(run("verify --json " + changed));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_TRUE(lines[0].contains("message"));
  EXPECT_EQ(lines[0].at("ok"), false);
}

TEST_F(Verify, AResultOfAnotherShapeFailsTheCase) {
  const auto outcome = run("verify " + with_text("ep2", R"(\"top_k\": 2)", R"(\"top_k\": 1)"));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(says(outcome, "FAILED: expert_ids is recorded as i64 [29,2], but ours is i64 [29,1]"))
      << outcome.output;
}

// A GPU, if there is one, is hidden.
TEST_F(Verify, AGpuThatCannotBeUsedIsSaidOnce) {
  const auto outcome =
      run("verify --device cuda --ranks 1,3 " + golden("local") + " " + golden("ep2"),
          "CUDA_VISIBLE_DEVICES=");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(outcome.output.starts_with("switchyard: GPU 0 cannot be used: ")) << outcome.output;
  EXPECT_FALSE(says(outcome, "FAILED")) << outcome.output;
}

TEST_F(Verify, WrongPathsAreNamed) {
  const auto expect_error = [](const std::string& arguments, int status, const std::string& text) {
    const auto outcome = run("verify " + arguments);
    EXPECT_EQ(outcome.status, status) << arguments;
    EXPECT_TRUE(says(outcome, text)) << outcome.output;
  };
  expect_error("", 2, "PATH");
  expect_error("/no/such/thing", 1, "there is no file or folder /no/such/thing");
  expect_error(folder_.string(), 1, "the folder " + folder_.string() + " has no *.safetensors");
  expect_error(golden("local") + " --ranks 0", 2, "--ranks");
  expect_error(golden("local") + " --ranks 1,x", 2, "--ranks");
  expect_error(golden("local") + " --comm mpi --ranks 2", 2, "set the number by mpirun -n");
  expect_error(golden("local") + " --device tpu", 2, "--device: \"tpu\" is not one of cpu|cuda");
  expect_error(golden("local") + " --kernels best", 2,
               "--kernels: it works only on GPUs: add --device cuda");
  expect_error(golden("local") + " --device cuda --ranks 1,33", 2,
               "--ranks: 33 are too many: --device cuda allows at most 32 threads");
}

TEST_F(Verify, AFileThatIsNoCaseIsAnError) {
  const auto expect_error = [](const std::string& path, const std::string& text) {
    const auto outcome = run("verify " + path);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_TRUE(says(outcome, text)) << outcome.output;
  };
  const auto refused = [](const std::string& path) { return path + " is not a recorded case: "; };
  expect_error(write("too short", "broken"), "broken.safetensors");
  const std::string empty(1, '\x2');
  const auto plain = write(empty + std::string(7, '\0') + "{}", "plain");
  expect_error(plain, refused(plain) + "its metadata has no \"peer\"");
  const auto expect_change = [&](const std::string& name, const std::string& from,
                                 const std::string& to, const std::string& text) {
    const auto path = with_text(name, from, to);
    expect_error(path, refused(path) + text);
  };
  expect_change("hf_mixtral", "transformers\"", "Transformers\"",
                "its peer \"Transformers\" is unknown");
  expect_change("hf_mixtral", "MixtralSparse", "MixtralDenser",
                "its class \"MixtralDenserMoeBlock\" is unknown");
  expect_change("local", "softmax_topk", "hashing_topk", "its router \"hashing_topk\" is unknown");
  expect_change("local", R"(\"silu\")", R"(\"sulu\")", "its activation \"sulu\" is unknown");
  expect_change("local", R"(\"ep\": 1,)", R"(\"ep\": 0,)", "ep (0) must be 1 to 64");
  expect_change("local", R"(\"experts\": 8)", R"(\"experts\": 9)",
                "its router is [8,16], but it has 9 experts");
  expect_change("local", R"(\"dim\")", R"(\"dmi\")", "[json.exception");
}

#ifdef SWITCHYARD_MPIRUN
const std::string kFourProcesses = std::string(SWITCHYARD_MPIRUN) + " -n 4";

TEST_F(Verify, UnderMpiCasesForOtherNumbersOfRanksAreSkipped) {
  const auto lines = lines_of(
      run("verify --comm mpi --json " + golden("ep4_gelu") + " " + golden("ep2"), kFourProcesses));
  ASSERT_EQ(lines.size(), 10U + 1U + 1U);
  EXPECT_EQ(lines[10].at("skipped"), "recorded with ep 2, not 4");
  EXPECT_EQ(lines[11].at("passed"), 1);
  EXPECT_EQ(lines[11].at("skipped"), 1);
  const auto none = run("verify --comm mpi " + golden("ep2"), kFourProcesses);
  EXPECT_EQ(none.status, 1) << none.output;
}

TEST_F(Verify, UnderMpiARankTellsTheOthersWhatItFound) {
  const auto far =
      run("verify --comm mpi " + with_value("ep4_gelu", "rank3.y", 1e3F), kFourProcesses);
  EXPECT_EQ(far.status, 1);
  EXPECT_TRUE(says(far, "FAILED on rank 3")) << far.output;
  // One rank's tensor is missing: the others learn of it, and the next case runs.
  const auto missing = with_text("ep4_gelu", "\"rank2.dy\"", "\"rank2.dz\"");
  const auto outcome =
      run("verify --comm mpi " + missing + " " + golden("ep4_uneven"), kFourProcesses);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(says(outcome, "rank2.dy")) << outcome.output;
  EXPECT_TRUE(says(outcome, "Cases passed: 1, failed: 1")) << outcome.output;
}
#endif

}  // namespace
}  // namespace switchyard::verify_test
