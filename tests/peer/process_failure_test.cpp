// SPDX-License-Identifier: Apache-2.0
// Jobs whose processes reach each other's memory, and of which one dies, stops or throws in the
// middle of a step: the survivors name it, and the next job works.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <tuple>

#include "support/device/devices.h"
#include "support/mpi_job.h"

namespace switchyard::testing::process_failure_test {
namespace {

using namespace std::chrono_literals;

// Counts our named files of shared memory. MPI has its own files there.
std::ptrdiff_t num_shared_files() {
  const std::filesystem::directory_iterator all("/dev/shm");
  return std::count_if(begin(all), end(all), [](const auto& file) {
    return file.path().filename().string().starts_with("switchyard");
  });
}

class ProcessFailure : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "cuda") return;
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }

  static void start(MpiJob& job, const std::string& scenario, const std::string& stage,
                    std::chrono::milliseconds timeout) {
    job.start(SWITCHYARD_MPIRUN, 4, SWITCHYARD_STEP_FAILURE,
              scenario + " " + stage + " " + std::to_string(timeout.count()) + " " + GetParam());
  }

  // At every stage: survivors say these words of rank 2, in less than so many seconds.
  static void expect_all_named(const std::string& scenario, std::chrono::milliseconds timeout,
                               const std::string& words, double within_seconds) {
    const auto files = num_shared_files();
    for (const std::string stage : {"plan", "dispatch", "experts", "combine"}) {
      SCOPED_TRACE(scenario + " at " + stage);
      MpiJob job;
      start(job, scenario, stage, timeout);
      for (const int rank : {0, 1, 3}) {
        const auto outcome = job.outcome_of(rank, 30s);
        EXPECT_NE(outcome.find("CommunicationError: "), std::string::npos)
            << "rank " << rank << ": " << outcome << job.log();
        EXPECT_NE(outcome.find(words), std::string::npos) << outcome;
        EXPECT_NE(outcome.find("\nranks: 2\n"), std::string::npos) << outcome;
        EXPECT_LT(MpiJob::seconds_in(outcome), within_seconds) << outcome;
      }
    }
    MpiJob next;
    start(next, "none", "plan", 20s);
    for (int rank = 0; rank < 4; ++rank) {
      const auto outcome = next.outcome_of(rank, 30s);
      EXPECT_NE(outcome.find("no error"), std::string::npos) << outcome << next.log();
    }
    next.end();
    EXPECT_EQ(num_shared_files(), files);
  }
};

TEST_P(ProcessFailure, AKilledProcessIsNamedLongBeforeTheDeadline) {
  expect_all_named("kill", 20s, "rank 2", 8.0);
}

TEST_P(ProcessFailure, AStoppedProcessIsNamedByTheDeadline) {
  expect_all_named("stop", 1s, "rank 2 did not", 8.0);
}

TEST_P(ProcessFailure, AProcessThatThrowsIsNamedWithItsReason) {
  expect_all_named("throw", 20s, "out of coffee", 8.0);
}

TEST_P(ProcessFailure, AProcessWithoutMemoryIsNamedWithItsReason) {
  expect_all_named("no-memory", 20s, "no room for 4096 bytes", 8.0);
}

class GpuFailure : public ProcessFailure {};

TEST_P(GpuFailure, AProcessWhoseGpuFailsIsNamed) { expect_all_named("fault", 20s, "rank 2", 12.0); }

INSTANTIATE_TEST_SUITE_P(Cpu, ProcessFailure, ::testing::Values("cpu"));
INSTANTIATE_TEST_SUITE_P(Cuda, ProcessFailure, ::testing::Values("cuda"));
INSTANTIATE_TEST_SUITE_P(Cuda, GpuFailure, ::testing::Values("cuda"));

}  // namespace
}  // namespace switchyard::testing::process_failure_test
