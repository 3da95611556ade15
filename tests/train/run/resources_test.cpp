// SPDX-License-Identifier: Apache-2.0
#include "run/resources.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#include "model/model_size.h"
#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/error.h"
#include "train/small_run.h"

namespace switchyard::train::resources_test {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// Files that a system would have.
class AvailableMemory : public ::testing::Test {
 protected:
  void put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name) << text;
  }
  std::int64_t available() const { return available_memory(folder_.path()); }

  const testing::Folder folder_;
};

TEST_F(AvailableMemory, IsUnlimitedWithoutAKnownLimit) { EXPECT_EQ(available(), kUnlimited); }

TEST_F(AvailableMemory, ThePeakIsThatOfTheProcess) {
  EXPECT_EQ(peak_memory(folder_.path()), 0);
  put("proc/self/status", "Name:\tswitchyard\nVmPeak:\t 9999 kB\nVmHWM:\t   1234 kB\n");
  EXPECT_EQ(peak_memory(folder_.path()), 1234 * 1024);
  const std::string touched(50'000'000, 'x');
  EXPECT_GE(peak_memory(), std::ssize(touched));
}

TEST_F(AvailableMemory, IsTheSystemsWithSwap) {
  put("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   4000 kB\nSwapFree:  1000 kB\n");
  EXPECT_EQ(available(), 5000 * 1024);
}

TEST_F(AvailableMemory, IsLimitedByTheCgroupAndItsParents) {
  put("proc/meminfo", "MemAvailable:   4000 kB\n");
  put("proc/self/cgroup", "0::/a/b\n");
  put("sys/fs/cgroup/a/b/memory.max", "max\n");
  put("sys/fs/cgroup/a/b/memory.current", "5000\n");
  EXPECT_EQ(available(), 4000 * 1024);
  put("sys/fs/cgroup/a/memory.max", "9000\n");
  put("sys/fs/cgroup/a/memory.current", "7000\n");
  EXPECT_EQ(available(), 2000);
  put("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500\n");
  EXPECT_EQ(available(), 2500) << "what is only cached is given back";
  put("sys/fs/cgroup/a/memory.current", "10000\n");
  put("sys/fs/cgroup/a/memory.stat", "");
  EXPECT_EQ(available(), 0);
}

TEST_F(AvailableMemory, KnowsCgroupsOfVersionOne) {
  put("proc/self/cgroup", "7:cpu,memory:/job\n3:memoryless:/other\n");
  put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9000\n");
  put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8000\n");
  EXPECT_EQ(available(), 1000);
}

TEST(MemoryNeed, GrowsWithWhatItIsFor) {
  TrainConfig config = small_config();
  const Spread two{.ranks = 2, .ranks_here = 2};
  const auto base = memory_of_training(config, two, 1000);
  EXPECT_EQ(base.text, 1000);
  EXPECT_EQ(memory_of_training(config, {.ranks = 2, .ranks_here = 1}, 0).step, base.step / 2);
  config.data.batch *= 2;
  EXPECT_EQ(memory_of_training(config, two, 0).step, 2 * base.step);
  const auto whole = 4 * size_of(config.model).parameters;
  EXPECT_GE(base.parameters, 2 * whole) << "each rank makes all of it";
  EXPECT_EQ(memory_of_training(config, {}, 0).parameters, 4 * whole);
}

TEST(MemoryNeed, OfTheLargestRunIsALargeNumber) {
  TrainConfig config;
  config.model = {.layers = 1024,
                  .hidden = 65536,
                  .context = 1 << 20,
                  .experts = 65536,
                  .top_k = 1024,
                  .intermediate = 1 << 20};
  config.data.batch = 1 << 20;
  const auto need =
      memory_of_training(config, {.ranks = 65536, .ranks_here = 65536}, std::int64_t{4} << 30);
  EXPECT_EQ(need.total(), kUnlimited);
}

TEST(MemoryNeed, IsRefusedWithItsParts) {
  const MemoryNeed need{.parameters = 2'000'000'000,
                        .step = 500'000'000,
                        .text = 400'000'000,
                        .between_ranks = 100'000'000};
  EXPECT_EQ(testing::error_of<Unsupported>([&] { require_memory(need, 2'900'000'000, "it"); }),
            "it would need about 3.0 GB of memory, but 2.9 GB are available; parameters and their "
            "training state need 2.0 GB, a step 0.5 GB, the text 0.4 GB, and buffers for exchanges "
            "between ranks 0.1 GB");
  require_memory(need, 3'000'000'000, "it");
}

TEST(IdleRanks, HaveNeitherTokensNorExperts) {
  TrainConfig config = small_config();  // a batch of 4, 5 experts
  EXPECT_EQ(num_idle_ranks(config, 4), 0);
  EXPECT_EQ(num_idle_ranks(config, 1000), 1000 - 4 - 5);
  config.mesh = {.dp = 8, .ep = 1};
  EXPECT_EQ(num_idle_ranks(config, 8), 0) << "each has all experts";
  config.mesh = {.sp = 2};
  EXPECT_EQ(num_idle_ranks(config, 12), 0);
}

}  // namespace
}  // namespace switchyard::train::resources_test
