// SPDX-License-Identifier: Apache-2.0
// switchyard bench checkpoint, as a user calls it.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "cli/command.h"
#include "support/folder.h"

namespace switchyard::bench_checkpoint_test {
namespace {

using testing::lines_of;
using testing::run;

const std::string kTiny = "bench checkpoint --size 3MiB --repeat 1 ";

void expect_checkpoint(const testing::Outcome& outcome, std::size_t ranks) {
  ASSERT_EQ(outcome.status, 0) << outcome.output;
  const auto line = lines_of(outcome).at(0);
  const auto bytes = line.at("bytes_by_rank").get<std::vector<std::int64_t>>();
  EXPECT_EQ(bytes.size(), ranks);
  EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}), 3 << 20);
  EXPECT_EQ(line.at("expert_bytes"), 3 << 20);
  EXPECT_EQ(line.at("each_byte_once"), true);
  for (const char* field :
       {"save_gb_per_s", "load_gb_per_s", "ceiling_gb_per_s", "fraction_of_ceiling"}) {
    EXPECT_GT(line.at(field).get<double>(), 0.0) << field;
  }
}

TEST(BenchCheckpoint, PrintsOneObjectAndLeavesNothing) {
  const testing::Folder folder;
  for (const int ranks : {1, 3}) {
    expect_checkpoint(
        run(kTiny + "--json --ranks " + std::to_string(ranks) + " --dir " + folder.path().string()),
        static_cast<std::size_t>(ranks));
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(BenchCheckpoint, TheTableIsForPeople) {
  const auto outcome = run(kTiny + "--ranks 2");
  EXPECT_EQ(outcome.status, 0);
  for (const char* words : {"together 3145728: each byte of the experts once",
                            "bytes read by rank: 1572864, 1572864", "% of the ceiling"}) {
    EXPECT_NE(outcome.output.find(words), std::string::npos) << words << "\n" << outcome.output;
  }
}

TEST(BenchCheckpoint, WrongValuesNameTheFlag) {
  for (const std::string arguments : {"--size much", "--size 0", "--dir /no/such", "--repeat 0"}) {
    const auto outcome = run("bench checkpoint " + arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    const auto flag = arguments.substr(0, arguments.find(' '));
    EXPECT_NE(outcome.output.find(flag), std::string::npos) << outcome.output;
  }
}

#ifdef SWITCHYARD_MPIRUN
TEST(BenchCheckpoint, RunsUnderMpi) {
  expect_checkpoint(run(kTiny + "--json --comm mpi", std::string(SWITCHYARD_MPIRUN) + " -n 3"), 3);
}
#endif

}  // namespace
}  // namespace switchyard::bench_checkpoint_test
