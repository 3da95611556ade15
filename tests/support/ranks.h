// SPDX-License-Identifier: Apache-2.0
// Runs a test body on every rank of a group: threads in a plain run, processes under mpirun.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/dispatcher.h"

namespace switchyard::testing {

struct RankCase {
  std::string backend;
  int size = 1;
};
void PrintTo(const RankCase& rank_case, std::ostream* out);  // for GoogleTest

// Returns sizes 1, 2, 3, 4, 7, 8 over threads; under mpirun, its one size over MPI.
std::vector<RankCase> rank_cases();
// Returns only the cases with `size` ranks.
std::vector<RankCase> rank_cases_of(int size);
// Names the instances of a parametrised suite, such as "threads4".
std::string rank_case_name(const ::testing::TestParamInfo<RankCase>& param);

bool under_mpirun();

constexpr auto kTestTimeout = std::chrono::seconds(30);

// Calls `body` on each rank, and returns when all have finished.
void on_ranks(const RankCase& rank_case, const std::function<void(Communicator&)>& body);

// The outcome on each rank of a group of threads.
struct Outcome {
  // The ranks that threw a CommunicationError: its message, and the ranks it named.
  std::map<int, std::string> messages;
  std::map<int, std::vector<int>> named;
  std::string reported;  // message thrown by run_ranks
  std::chrono::duration<double> time{};

  void expect_same(std::size_t num_ranks) const;  // the same error on `num_ranks` ranks
};
Outcome outcome_of(int num_ranks, std::chrono::milliseconds timeout,
                   const std::function<void(Communicator&)>& body);

// Returns the movers that a communicator supports.
std::vector<MoverKind> movers_of(Communicator& comm);

// Set by main under mpirun.
void set_mpi_world(Communicator* world);

}  // namespace switchyard::testing
