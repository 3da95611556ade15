// SPDX-License-Identifier: Apache-2.0
// switchyard bench layer, as a user calls it.
#include <gtest/gtest.h>

#include <string>

#include "cli/command.h"

namespace switchyard::bench_layer_test {
namespace {

using nlohmann::json;
using testing::lines_of;
using testing::run;

const std::string kTiny = "bench layer --shape 96,40,24,8,3 --repeat 1 --json ";

void expect_layer(const testing::Outcome& outcome, int ranks, int threads) {
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const auto lines = lines_of(outcome);
  ASSERT_EQ(lines.size(), 1);
  const json& line = lines[0];
  for (const char* field : {"ms_forward", "ms_forward_backward", "gflops_forward_backward",
                            "ceiling_gflops", "fraction_of_ceiling"}) {
    EXPECT_GT(line.at(field).get<double>(), 0.0) << field;
  }
  EXPECT_EQ(line.at("host_syncs_forward"), 0);
  EXPECT_EQ(line.at("host_syncs_backward"), 0);
  EXPECT_EQ(line.at("ranks"), ranks);
  EXPECT_EQ(line.at("threads"), threads);
  EXPECT_EQ(line.at("bytes_on_wire").get<std::int64_t>() > 0, ranks > 1);
  for (const char* stage : {"route", "plan", "dispatch", "experts", "activation", "combine"}) {
    EXPECT_GE(line.at("stages").at("forward").at(stage).get<double>(), 0.0) << stage;
  }
  for (const char* stage : {"experts", "activation", "dispatch_backward", "route_backward"}) {
    EXPECT_GE(line.at("stages").at("backward").at(stage).get<double>(), 0.0) << stage;
  }
}

TEST(BenchLayer, PrintsOneObject) {
  expect_layer(run(kTiny + "--ranks 1 --threads 2"), 1, 2);
  expect_layer(run(kTiny + "--ranks 3 --threads 1 --dtype bf16 --routing zipf"), 3, 1);
  expect_layer(run(kTiny + "--ranks 2 --threads 1 --sizing bounded --keep activations "
                           "--weight-stage input --device cpu --routing balanced"),
               2, 1);
}

// x, the inner values, ids and weights, slots, targets, sources and those of rows, and the small
// tables of the plan, eleven of one padded piece each, beside problems and sums.
TEST(BenchLayer, CountsWhatIsKept) {
  const auto line = lines_of(run(kTiny + "--ranks 1")).at(0);
  const double tables = 11 * 128.0 + 5 * 8.0 + (2 * 8 + 1 + 2) * 8.0;
  const double expected = 4.0 * (40 + 2 * 3 * 24 + 6 * 3) + tables / 96;
  EXPECT_NEAR(line.at("activation_bytes_per_token").get<double>(), expected, 0.1);
  const auto again = lines_of(run(kTiny + "--ranks 1 --keep nothing")).at(0);
  EXPECT_NEAR(again.at("activation_bytes_per_token").get<double>(), expected - 4 * 2 * 3 * 24, 0.1);
}

// The wrong --threads keeps large layers from being run, but is found after the shape.
TEST(BenchLayer, KnowsShapesByName) {
  for (const char* name : {"small", "qwen3-30b", "gpt-oss", "qwen3-next-like", "1,8,8,2,2"}) {
    const auto outcome = run(std::string("bench layer --device cuda --threads 2 --shape ") + name);
    EXPECT_EQ(outcome.status, 2) << name;
    EXPECT_NE(outcome.output.find("--threads: it works only on CPUs"), std::string::npos)
        << outcome.output;
  }
}

TEST(BenchLayer, TheTableIsForPeople) {
  const auto outcome = run("bench layer --shape 64,32,16,4,2 --repeat 1");
  EXPECT_EQ(outcome.status, 0);
  for (const char* words :
       {"of the ceiling", "GEMM ceiling", "route_backward", "bytes per token"}) {
    EXPECT_NE(outcome.output.find(words), std::string::npos) << words << "\n" << outcome.output;
  }
}

TEST(BenchLayer, TrainsWithLossesToo) {
  EXPECT_EQ(run("bench layer --shape 64,32,16,4,2 --repeat 1").output.find("losses"),
            std::string::npos);
  const auto outcome = run("bench layer --shape 64,32,16,4,2 --repeat 1 --losses");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.output.find("losses"), std::string::npos) << outcome.output;
}

TEST(BenchLayer, WrongValuesNameTheFlagAndWhatIsAllowed) {
  const auto expect_error = [](const std::string& arguments, const std::string& message) {
    const auto outcome = run("bench layer " + arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_NE(outcome.output.find(message), std::string::npos) << outcome.output;
  };
  expect_error("--shape tiny",
               "\"tiny\" is not small, fine, qwen3-30b, olmoe, mixtral, dsv3-slice, gpt-oss, "
               "dsv2-lite, granite, kimi-slice, qwen3-235b-half, scout, odd, qwen3-next-like, or "
               "T,H,I,E,K: 5 positive numbers");
  expect_error("--shape 8,8,8,2,3", "K (3) must not exceed E (2)");
  expect_error("--keep all", "--keep: \"all\" is not one of activations|nothing|rows");
  expect_error("--weight-stage late", "--weight-stage: \"late\" is not one of");
  expect_error("--sizing loose", "--sizing: \"loose\" is not one of bounded|exact");
  expect_error("--device tpu", "--device: \"tpu\" is not one of cpu|cuda");
  expect_error("--device cuda --kernels own", "--kernels: \"own\" is not one of best|portable");
  expect_error("--kernels portable", "--kernels: it works only on GPUs: add --device cuda");
  expect_error("--device cuda --ranks 64", "--ranks: 64 are too many");
  expect_error("--device cuda --threads 2",
               "--threads: it works only on CPUs: leave the option out");
  expect_error("--threads 0", "--threads");
}

// By one of the ranks that would be on it. Where there is a GPU, it is hidden.
TEST(BenchLayer, SaysOnceThatAGpuCannotBeUsed) {
  const auto outcome = run("bench layer --device cuda --ranks 4", "CUDA_VISIBLE_DEVICES=");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(outcome.output.starts_with("switchyard: GPU 0 cannot be used: ")) << outcome.output;
  EXPECT_EQ(outcome.output.find('\n'), outcome.output.size() - 1) << outcome.output;
}

#ifdef SWITCHYARD_MPIRUN
TEST(BenchLayer, RunsUnderMpi) {
  expect_layer(run(kTiny + "--comm mpi --threads 1", std::string(SWITCHYARD_MPIRUN) + " -n 3"), 3,
               1);
}
#endif

}  // namespace
}  // namespace switchyard::bench_layer_test
