// SPDX-License-Identifier: Apache-2.0
// The switchyard command, as a user calls it.
#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/command.h"

namespace switchyard::cli_test {
namespace {

using nlohmann::json;
using testing::lines_of;
using testing::run;

TEST(Cli, InfoListsBackendsAndDevices) {
  const auto info = run("info");
  EXPECT_EQ(info.status, 0);
  for (const char* word : {"Switchyard", "oneDNN", "cpu", "cuda", "threads", "mpi"}) {
    EXPECT_NE(info.output.find(word), std::string::npos) << word << "\n" << info.output;
  }
  const auto parsed = lines_of(run("info --json"));
  EXPECT_TRUE(parsed.at(0).at("communicators").at("threads").at("available"));
}

TEST(Cli, OutputThatIsLostIsAnError) {
  EXPECT_EQ(run("info > /dev/full").status, 1);
  EXPECT_EQ(run("info --json > /dev/full").status, 1);
  EXPECT_EQ(run("info --json >&-").status, 1);
  EXPECT_EQ(run("--version > /dev/full").status, 1);
  EXPECT_EQ(run("bench layer --help > /dev/full").status, 1);
  EXPECT_EQ(run("train --no-such-flag > /dev/full").status, 2);  // where errors are lost, too
}

void expect_operations(const std::vector<json>& lines, std::int64_t tokens, std::int64_t hidden,
                       std::int64_t top_k, std::int64_t size) {
  const std::array<const char*, 5> ops{"plan", "dispatch", "combine", "combine_backward",
                                       "dispatch_backward"};
  ASSERT_EQ(lines.size(), ops.size());
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const json& line = lines[i];
    EXPECT_EQ(line.at("op"), ops[i]);
    EXPECT_GT(line.at("ms").get<double>(), 0.0);
    EXPECT_GT(line.at("gb_per_s").get<double>(), 0.0);
    EXPECT_GT(line.at("ceiling_gb_per_s").get<double>(), 0.0);
    EXPECT_GT(line.at("fraction_of_ceiling").get<double>(), 0.0);
    EXPECT_TRUE(line.contains("bytes_on_wire"));
    if (i > 0) {
      EXPECT_EQ(line.at("bytes"), (1 + top_k) * tokens * hidden * size);
    }
  }
}

TEST(Cli, BenchDispatchPrintsOneObjectAnOperation) {
  for (const std::string routing : {"balanced", "uniform", "zipf", "one-expert"}) {
    const auto outcome =
        run("bench dispatch --shape 96,40,8,3 --ranks 3 --repeat 2 --dtype bf16 "
            "--json --routing " +
            routing);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
    expect_operations(lines_of(outcome), 96, 40, 3, 2);
  }
}

// A token crosses to a rank once, however many experts it picked there.
TEST(Cli, PackedDispatchSendsLessThanDirect) {
  const std::string shape =
      "bench dispatch --shape 256,64,8,6 --ranks 2 --repeat 1 --json --mover ";
  const auto direct = lines_of(run(shape + "direct"));
  const auto packed = lines_of(run(shape + "packed"));
  const auto wire = [](const std::vector<json>& lines, std::size_t op) {
    return lines.at(op).at("bytes_on_wire").get<std::int64_t>();
  };
  EXPECT_LT(wire(packed, 1), wire(direct, 1) / 2);  // about 3 of 6 picks go to the other rank
  EXPECT_EQ(wire(packed, 2), wire(direct, 2));      // combine returns one row an assignment
}

TEST(Cli, TheTableIsForPeople) {
  const auto outcome = run("bench dispatch --shape 64,32,4,2 --ranks 2 --repeat 1");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.output.find("of ceiling"), std::string::npos) << outcome.output;
  EXPECT_NE(outcome.output.find("dispatch_backward"), std::string::npos);
}

TEST(Cli, WrongValuesNameTheFlagAndWhatIsAllowed) {
  const auto expect_error = [](const std::string& arguments, const std::string& message) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_NE(outcome.output.find(message), std::string::npos) << outcome.output;
  };
  expect_error("bench dispatch --shape 1,2,3",
               "--shape: \"1,2,3\" is not T,H,E,K: 4 positive numbers separated by commas");
  expect_error("bench dispatch --shape 8,8,-1,2", "\"8,8,-1,2\" is not T,H,E,K");
  expect_error("bench dispatch --shape 8,8,2,3", "K (3) must not exceed E (2)");
  expect_error("bench dispatch --dtype f16", "--dtype: \"f16\" is not one of bf16|f32");
  expect_error("bench dispatch --mover train", "--mover: \"train\" is not one of direct|packed");
  expect_error("bench dispatch --comm pigeon", "--comm");
  expect_error("bench dispatch --ranks 0", "--ranks");
  expect_error("bench dispatch --kernels best", "--kernels: it works only on GPUs");
  expect_error("bench dispatch --device cuda --mover packed",
               "--mover: packed works only on CPUs: leave the option out, or use peer");
  expect_error("bench dispatch --device cuda --ranks 33",
               "--ranks: 33 are too many: --device cuda allows at most 32 threads");
  expect_error("bench", "subcommand");
  expect_error("", "subcommand");
}

// By one of the ranks that would be on it. Where there is a GPU, it is hidden.
TEST(Cli, BenchDispatchSaysOnceThatAGpuCannotBeUsed) {
  const auto outcome = run("bench dispatch --device cuda --ranks 4", "CUDA_VISIBLE_DEVICES=");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(outcome.output.starts_with("switchyard: GPU 0 cannot be used: ")) << outcome.output;
  EXPECT_EQ(outcome.output.find('\n'), outcome.output.size() - 1) << outcome.output;
}

TEST(Cli, UnknownArgumentsSuggestTheClosest) {
  const auto expect_error = [](const std::string& arguments, const std::string& message) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_TRUE(outcome.output.starts_with("switchyard: " + message + "\n")) << outcome.output;
  };
  const std::string train = "\"tarin\" is not a subcommand of switchyard; the closest is \"train\"";
  expect_error("tarin", train);
  expect_error("tarin --steps 3", train);
  expect_error("bench dispach",
               "\"dispach\" is not a subcommand of switchyard bench; the closest is \"dispatch\"");
  expect_error("--versoin",
               "\"--versoin\" is not an option of switchyard; the closest is "
               "\"--version\"");
  expect_error("inspect --rank 2",
               "\"--rank\" is not an option of switchyard inspect; the closest "
               "is \"--ranks\"");
  expect_error("bench layer --picks 2", "\"--picks\" is not an option of switchyard bench layer");
  expect_error("info twice", "\"twice\" is an unexpected argument for switchyard info");
  expect_error("inspect a b", "\"b\" is an unexpected argument for switchyard inspect");
}

TEST(Cli, SampleHelpNamesACheckpointFile) {
  const auto help = run("sample --help");
  EXPECT_NE(help.output.find("step-00000400.safetensors"), std::string::npos) << help.output;
}

#ifdef SWITCHYARD_MPIRUN
TEST(Cli, UnderMpiOnlyRankZeroPrints) {
  const auto outcome = run("bench dispatch --comm mpi --shape 64,32,8,2 --repeat 2 --json",
                           std::string(SWITCHYARD_MPIRUN) + " -n 4");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  expect_operations(lines_of(outcome), 64, 32, 2, 4);
}

TEST(Cli, MpiRefusesWhatItCannotDo) {
  const auto ranks =
      run("bench dispatch --comm mpi --ranks 3", std::string(SWITCHYARD_MPIRUN) + " -n 1");
  EXPECT_EQ(ranks.status, 2);
  EXPECT_NE(ranks.output.find("--ranks: 3 is not the number of processes that were started, 1"),
            std::string::npos)
      << ranks.output;
  const auto mover =
      run("bench dispatch --comm mpi --mover direct", std::string(SWITCHYARD_MPIRUN) + " -n 2");
  EXPECT_NE(mover.status, 0);
  EXPECT_NE(mover.output.find("the direct mover needs ranks that share memory"), std::string::npos)
      << mover.output;
}
#endif

}  // namespace
}  // namespace switchyard::cli_test
