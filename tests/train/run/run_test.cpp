// SPDX-License-Identifier: Apache-2.0
// Errors that only one rank of a run meets.
#include "run/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "checkpoints/checkpoints.h"
#include "run/summary.h"
#include "support/errors.h"
#include "support/folder.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"
#include "train/small_run.h"

namespace switchyard::train::run_test {
namespace {

using testing::error_of;

// The same path leads to other files on the last rank, as on machines of their own.
class RunTest : public ::testing::TestWithParam<testing::RankCase> {
 protected:
  static TrainConfig config() {
    TrainConfig config = small_config();
    config.report.clear();
    return config;
  }
  static bool is_odd(const Communicator& world) { return world.rank() == world.size() - 1; }
  // Between the last rank and the first.
  static void expect_disagreement(Communicator& world, const TrainConfig& own,
                                  const std::string& what) {
    const auto error = error_of<InvalidArgument>([&] { run(world, own); });
    EXPECT_TRUE(error.starts_with("ranks disagree about " + what + " (its hash): rank 0 has "))
        << error;
    const auto odd = ", rank " + std::to_string(world.size() - 1) + " has ";
    EXPECT_NE(error.find(odd), std::string::npos) << error;
  }
};

TEST_P(RunTest, ATextThatOneRankCannotReadIsNamedByAll) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    TrainConfig own = config();
    if (is_odd(world)) own.data.corpus = "/nowhere/text";
    EXPECT_EQ(error_of<InvalidArgument>([&] { run(world, own); }),
              "the corpus /nowhere/text cannot be read: No such file or directory");
    world.barrier();  // still usable
  });
}

TEST_P(RunTest, ATextThatIsAnotherOnOneRankIsNamedByAll) {
  const auto ranks = GetParam().size;
  if (ranks == 1) return;
  testing::on_ranks(GetParam(), [&](Communicator& world) {
    const testing::Folder folder;
    TrainConfig own = config();
    own.data.corpus = (folder / "text").string();
    // Also one that is too short to train on.
    std::ofstream(own.data.corpus) << small_text().substr(0, is_odd(world) ? 40 : 4000);
    expect_disagreement(world, own, "the text " + own.data.corpus);
  });
}

TEST_P(RunTest, ACheckpointThatOneRankCannotReadIsNamedByAll) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    const testing::Folder folder;
    {
      const auto one = connect();
      SmallRun alone(*one, config());
      save(alone.trainer, folder.path(), 1);
    }
    TrainConfig own = config();
    own.resume = is_odd(world) ? "/nowhere/saved" : folder.path().string();
    EXPECT_EQ(error_of<InvalidArgument>([&] { run(world, own); }),
              "there is no checkpoint /nowhere/saved");
    world.barrier();
  });
}

TEST_P(RunTest, AnotherCheckpointOnOneRankIsNamedByAll) {
  const auto ranks = GetParam().size;
  if (ranks == 1) return;
  testing::on_ranks(GetParam(), [&](Communicator& world) {
    const testing::Folder folder;
    {
      const auto one = connect();
      SmallRun alone(*one, config());
      if (is_odd(world)) alone.trainer.step();
      save(alone.trainer, folder.path(), 1);
    }
    TrainConfig own = config();
    own.resume = folder.path().string();
    expect_disagreement(world, own, "the newest checkpoint of " + own.resume);
  });
}

TEST_P(RunTest, ATextThatIsTooShortIsNamedByAll) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    const testing::Folder folder;
    TrainConfig own = config();
    own.data.corpus = (folder / "text").string();
    std::ofstream(own.data.corpus) << small_text().substr(0, 100);
    EXPECT_EQ(error_of<InvalidArgument>([&] { run(world, own); }),
              own.data.corpus +
                  " is too short: its 90 bytes of training text and 10 bytes of held-out text must "
                  "each be at least --context 16 + 1; give more text, or a smaller --context");
  });
}

TEST_P(RunTest, DivergenceIsNamedByAll) {
  testing::on_ranks(GetParam(), [](Communicator& world) {
    TrainConfig own = config();
    own.optimizer.learning_rate = own.optimizer.final_learning_rate = 1e30F;
    own.optimizer.clip = 0.0F;
    const auto error = error_of<InvalidArgument>([&] { run(world, own); });
    EXPECT_TRUE(error.starts_with("step ")) << error;
    EXPECT_TRUE(error.ends_with("; a --learning-rate below 1e+30, or --clip 1, may help")) << error;
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RunTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Summary, NamesTheSizesOfTheMesh) {
  run_ranks(6, [](Communicator& world) {
    SmallRun run(world, with_mesh(small_config(), {.dp = 2}));
    const auto summary = summarise(run.trainer, 1.0);
    const auto has = [&](const std::string& name, const std::string& value) {
      return std::ranges::count(summary.configuration, std::pair(name, value)) == 1;
    };
    EXPECT_TRUE(has("dp", "2") && has("ep", "3") && has("sp", "1"));
    EXPECT_EQ(run.trainer.config().mesh.ep, 0) << "a checkpoint fits other ranks, too";
  });
}

}  // namespace
}  // namespace switchyard::train::run_test
