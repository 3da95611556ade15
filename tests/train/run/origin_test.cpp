// SPDX-License-Identifier: Apache-2.0
// Where a run takes place, and how its ranks are loaded.
#include "run/origin.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>

#include "run/summary.h"
#include "support/folder.h"
#include "support/ranks.h"
#include "switchyard/build_info.h"
#include "train/small_run.h"

namespace switchyard::train::origin_test {
namespace {

class OriginTest : public ::testing::TestWithParam<testing::RankCase> {};

TEST_P(OriginTest, IsOfThisMachineAndProgram) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    const auto before = std::time(nullptr);
    const Corpus text("small", small_text());
    const auto origin =
        gather_origin(world, text, {.command_line = "switchyard train", .commit = "abc"}, 7);
    std::array<char, 65> host{};
    ::gethostname(host.data(), host.size() - 1);
    EXPECT_EQ(origin.hosts, host.data());
    EXPECT_EQ(origin.began, 7);
    EXPECT_GE(origin.written, before - 1);
    EXPECT_LE(origin.written, std::time(nullptr) + 1);
    EXPECT_NE(origin.processor.find(cpu_numerics()), std::string::npos) << origin.processor;
    EXPECT_EQ(origin.version, version());
    EXPECT_EQ(origin.commit, "abc");
    EXPECT_EQ(origin.command_line, "switchyard train");
    EXPECT_EQ(origin.text, "small");
    EXPECT_EQ(origin.training_bytes + origin.held_out_bytes, text.bytes());
    EXPECT_GT(origin.training_bytes, origin.held_out_bytes);
    const bool is_one_process = world.backend() == "threads";
    ASSERT_EQ(std::ssize(origin.peak_bytes), is_one_process ? 1 : world.size());
    for (const auto bytes : origin.peak_bytes) EXPECT_GT(bytes, 1'000'000);
  });
}

// Two picks of every token, in one layer. A rank that it waits for is another rank of its experts.
TEST_P(OriginTest, TheRowsOfAllRanksAreThePicks) {
  const int ranks = GetParam().size;
  const int dp = ranks % 2 == 0 ? 2 : 1;
  testing::on_ranks(GetParam(), [&](Communicator& world) {
    const auto config = with_mesh(small_config(), {.dp = dp});
    SmallRun run(world, config);
    EXPECT_EQ(summarise(run.trainer, 1.0).ranks.size(), static_cast<std::size_t>(ranks));
    for (int i = 0; i < 3; ++i) run.trainer.step();
    const auto uses = summarise(run.trainer, 1.0).ranks;
    ASSERT_EQ(std::ssize(uses), ranks);
    std::int64_t rows = 0;
    for (int r = 0; r < ranks; ++r) {
      const RankUse& use = uses[static_cast<std::size_t>(r)];
      rows += use.rows;
      EXPECT_GE(use.waited_seconds, 0.0);
      EXPECT_EQ(use.waited_seconds > 0.0, use.waited_for != r);
      EXPECT_EQ(use.waited_for / (ranks / dp), r / (ranks / dp)) << "of another group";
    }
    EXPECT_EQ(rows, 3 * config.data.batch * config.model.context * config.model.top_k);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OriginTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Origin, AModelWithoutExpertsHasNoLoad) {
  const auto world = connect();
  auto config = small_config();
  config.model.moe_every = 4;  // of three layers
  SmallRun run(*world, config);
  run.trainer.step();
  EXPECT_TRUE(summarise(run.trainer, 1.0).ranks.empty());
}

TEST(Origin, HostsAreNamedWithTheirRanks) {
  EXPECT_EQ(describe_hosts({"a", "a"}), "a");
  EXPECT_EQ(describe_hosts({"b", "a", "b"}), "b (2 ranks), a (1 rank)");
}

TEST(Origin, TheCpuIsNamedAsLinuxNamesIt) {
  const testing::Folder root;
  EXPECT_EQ(cpu_name(root.path()), "");
  std::filesystem::create_directories(root / "proc");
  std::ofstream(root / "proc/cpuinfo")
      << "vendor_id\t: X\nmodel\t\t: 17\nmodel name\t: A CPU @ 3 GHz\nmodel name\t: B\n";
  EXPECT_EQ(cpu_name(root.path()), "A CPU @ 3 GHz");
}

}  // namespace
}  // namespace switchyard::train::origin_test
