// SPDX-License-Identifier: Apache-2.0
// Checkpoints that one job of processes saves and another loads, with other devices and another
// number of ranks: the weights arrive to the bit, and the next step has the bits of its device.
#include <gtest/gtest.h>

#include <chrono>
#include <ostream>
#include <string>

#include "support/device/devices.h"
#include "support/folder.h"
#include "support/mpi_job.h"

namespace switchyard::testing::moved_checkpoint_test {
namespace {

using namespace std::chrono_literals;

struct Job {
  std::string device;
  int num_ranks = 1;
};

struct Move {
  Job from, to;

  std::string name() const {
    return from.device + std::to_string(from.num_ranks) + "_to_" + to.device +
           std::to_string(to.num_ranks);
  }
  friend std::ostream& operator<<(std::ostream& out, const Move& move) {
    return out << move.name();
  }
};

class MovedCheckpoint : public ::testing::TestWithParam<Move> {
 protected:
  void SetUp() override {
    if (GetParam().from.device == "cpu" && GetParam().to.device == "cpu") return;
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }

  static void expect_no_error(const Job& on, const std::string& what, const Folder& checkpoints) {
    MpiJob job;
    job.start(SWITCHYARD_MPIRUN, on.num_ranks, SWITCHYARD_MOVED_CHECKPOINT,
              what + " " + on.device + " " + checkpoints.path().string());
    EXPECT_TRUE(job.ends_within(100s)) << what << " does not end:\n" << job.log();
    for (int rank = 0; rank < on.num_ranks; ++rank) {
      const auto outcome = job.outcome_of(rank, 0s);
      EXPECT_TRUE(outcome.starts_with("no error\n")) << what << ", rank " << rank << ":\n"
                                                     << outcome << job.log();
    }
  }
};

TEST_P(MovedCheckpoint, TheNextStepHasTheBitsOfItsDevice) {
  const Folder checkpoints;
  expect_no_error(GetParam().from, "save", checkpoints);
  if (HasFailure()) return;
  expect_no_error(GetParam().to, "load", checkpoints);
}

std::string name_of_move(const ::testing::TestParamInfo<Move>& param) { return param.param.name(); }

INSTANTIATE_TEST_SUITE_P(Cpu, MovedCheckpoint,
                         ::testing::Values(Move{{"cpu", 4}, {"cpu", 2}},
                                           Move{{"cpu", 2}, {"cpu", 4}}),
                         name_of_move);
INSTANTIATE_TEST_SUITE_P(Cuda, MovedCheckpoint,
                         ::testing::Values(Move{{"cuda", 4}, {"cpu", 2}},
                                           Move{{"cpu", 2}, {"cuda", 4}},
                                           Move{{"cuda", 2}, {"cuda", 4}}),
                         name_of_move);

}  // namespace
}  // namespace switchyard::testing::moved_checkpoint_test
