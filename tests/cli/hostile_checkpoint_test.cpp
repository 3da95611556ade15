// SPDX-License-Identifier: Apache-2.0
// Checkpoints and configurations whose sums are right, and whose numbers are not.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoints/checkpoint_header.h"
#include "checkpoints/checkpoints.h"
#include "cli/train_runs.h"
#include "switchyard/checkpoint.h"

namespace switchyard::testing::hostile_checkpoint_test {
namespace {

using train::CheckpointHeader;

// Limits the command's address space to less than these files used to make it allocate. Sanitizers
// reserve too many addresses for such a limit.
#ifdef SWITCHYARD_SANITIZED
constexpr const char* kLimits = "";
#else
constexpr const char* kLimits = "ulimit -v 3000000;";
#endif
constexpr const char* kInTime = "timeout -s KILL 60";

void expect_refused(const Outcome& outcome, int status, const std::string& what) {
  EXPECT_EQ(outcome.status, status) << outcome.output;
  EXPECT_NE(outcome.output.find(what), std::string::npos) << outcome.output;
}

class HostileCheckpoint : public TrainRuns {
 protected:
  void SetUp() override {
    TrainRuns::SetUp();
    losses("--ranks 1 --steps 2 --save " + saved());
  }

  // The run's checkpoint with another header, and right sums.
  template <typename Change>
  std::string changed(const Change& change) const {
    auto header = train::read_header(checkpoint(2));
    change(header);
    const auto path = (folder_ / "changed.safetensors").string();
    save_checkpoint(*connect(), path,
                    {.tensors = header.file->tensors(), .metadata = train::to_metadata(header)});
    return path;
  }
  static Outcome sample(const std::string& path) {
    return run("sample --bytes 4 " + path, std::string(kLimits) + kInTime);
  }
  Outcome resume(const std::string& path, const std::string& more = "") const {
    return run("train --report none --save none --steps 4 --resume " + path + " " + more,
               std::string(kLimits) + kInTime);
  }
  void expect_damaged(const std::string& path, const std::string& what) const {
    expect_refused(sample(path), 1, path + " is damaged: " + what);
    expect_refused(resume(path), 1, path + " is damaged: " + what);
  }
};

TEST_F(HostileCheckpoint, AModelThatTheFileDoesNotHoldIsNotMade) {
  const auto path = changed([](CheckpointHeader& header) {
    header.config.model.moe_every = 2;
    header.config.model.dense_intermediate = 1 << 20;
  });
  expect_damaged(path, "its options describe a model of ");
}

TEST_F(HostileCheckpoint, AModelOfUncountableParametersIsNotMade) {
  const auto path = changed([](CheckpointHeader& header) {
    header.config.model = {
        .layers = 1024, .hidden = 65536, .heads = 2, .experts = 65536, .intermediate = 1 << 20};
  });
  expect_damaged(path, "its options describe a model of 9223372036854775807 bytes");
}

TEST_F(HostileCheckpoint, HeadsThatDoNotDivideTheHiddenSizeAreRefused) {
  const auto path = changed([](CheckpointHeader& header) { header.config.model.heads = 65536; });
  expect_damaged(path, "--hidden 32 must be --heads 65536 times an even number");
}

TEST_F(HostileCheckpoint, APositionThatNoRunReachesIsRefused) {
  const auto path =
      changed([](CheckpointHeader& header) { header.progress.position = 9223372036854775807; });
  expect_damaged(path,
                 "train.position must be 2 to 2097152 after 2 steps, not 9223372036854775807");
}

TEST_F(HostileCheckpoint, AStepThatNoRunReachesIsRefused) {
  const auto path =
      changed([](CheckpointHeader& header) { header.progress.step = 9223372036854775807; });
  expect_damaged(path, "train.step must be at most 1000000000, not 9223372036854775807");
}

TEST_F(HostileCheckpoint, AFileDoesNotStartTooManyRanks) {
  const auto path = changed([](CheckpointHeader& header) { header.config.mesh.ranks = 65536; });
  expect_refused(resume(path), 2,
                 "a file asks for 65536 ranks, but may ask for at most 256; if you want them, give "
                 "--ranks 65536");
  EXPECT_EQ(resume(path, "--ranks 2").status, 0);
  EXPECT_EQ(sample(path).status, 0) << "one rank, whatever the file says";
}

TEST_F(HostileCheckpoint, ABatchThatNoMachineHoldsIsRefused) {
  const auto path = changed([](CheckpointHeader& header) {
    header.config.data.batch = 1 << 20;
    header.config.model.context = 20000;
  });
  expect_refused(resume(path), 1, "a run of 1 rank would need about ");
}

class HostileOptions : public TrainRuns {
 protected:
  Outcome with_config(const std::string& text, const std::string& more = "") const {
    const auto path = (folder_ / "config.json").string();
    std::ofstream(path) << text;
    return train("--steps 2 --config " + path + " " + more, kInTime);
  }
};

TEST_F(HostileOptions, ConfigurationsHaveABound) {
  expect_refused(train("--config /dev/zero", std::string(kLimits) + kInTime), 2,
                 "/dev/zero is larger than a configuration file may be (1048576 bytes)");
  expect_refused(with_config(std::string(1 << 20, ' ') + "{}"), 2,
                 "config.json is larger than a configuration file may be (1048576 bytes)");
  EXPECT_EQ(train("--config /dev/stdin", "echo '{\"steps\": 2}' |").status, 0);
}

TEST_F(HostileOptions, ConfigurationsDoNotStartTooManyThreads) {
  expect_refused(with_config(R"({"ranks": 65536})"), 2,
                 "a file asks for 65536 ranks, but may ask for at most");
  expect_refused(with_config(R"({"dp": 40, "ep": 40})"), 2, "a file asks for 1600 ranks");
  expect_refused(
      with_config(R"({"threads": 1024})", "--ranks 2"), 2,
      "a file asks for 1024 threads on each of 2 ranks, but may ask for at most 1024 in all");
  EXPECT_EQ(with_config(R"({"ranks": 2, "threads": 2})").status, 0);
}

TEST_F(HostileOptions, AxesThatMakeTooManyRanksAreRefused) {
  expect_refused(
      train("--dp 40000 --ep 40000"), 2,
      "--dp 40000 × --ep 40000 × --sp 1 are 1600000000 ranks, but at most 65536 are possible");
  expect_refused(
      train("--dp 65536 --ep 65536"), 2,
      "--dp 65536 × --ep 65536 × --sp 1 are 4294967296 ranks, but at most 65536 are possible");
}

TEST_F(HostileOptions, ARunLargerThanMemoryIsRefusedWithItsSize) {
  expect_refused(train("--ranks 60000"), 1, "a run of 60000 ranks would need about ");
}

TEST_F(HostileOptions, RanksThatWillBeIdleAreCounted) {
  const auto outcome = train("--steps 2 --ranks 8");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_NE(outcome.output.find("warning: 2 of 8 ranks will be idle: a batch of 4 sequences of 32 "
                                "bytes and 4 experts per layer leave no work for them"),
            std::string::npos)
      << outcome.output;
  EXPECT_EQ(train("--steps 2 --ranks 4").output.find("idle"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::testing::hostile_checkpoint_test
