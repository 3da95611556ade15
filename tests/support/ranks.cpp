// SPDX-License-Identifier: Apache-2.0
#include "support/ranks.h"

#include <cstdlib>
#include <mutex>
#include <ostream>
#include <stdexcept>

#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::testing {
namespace {

Communicator* mpi_world = nullptr;

}  // namespace

void set_mpi_world(Communicator* world) { mpi_world = world; }

bool under_mpirun() { return std::getenv("SWITCHYARD_TEST_MPI_SIZE") != nullptr; }

std::vector<RankCase> rank_cases() {
  if (const char* size = std::getenv("SWITCHYARD_TEST_MPI_SIZE")) return {{"mpi", std::atoi(size)}};
  std::vector<RankCase> cases;
  for (const int size : {1, 2, 3, 4, 7, 8}) cases.push_back({"threads", size});
  return cases;
}

std::vector<RankCase> rank_cases_of(int size) {
  auto cases = rank_cases();
  std::erase_if(cases, [&](const RankCase& c) { return c.size != size; });
  return cases;
}

void PrintTo(const RankCase& rank_case, std::ostream* out) {
  *out << rank_case.size << " ranks over " << rank_case.backend;
}

std::string rank_case_name(const ::testing::TestParamInfo<RankCase>& param) {
  return param.param.backend + std::to_string(param.param.size);
}

void on_ranks(const RankCase& rank_case, const std::function<void(Communicator&)>& body) {
  if (rank_case.backend == "threads") {
    run_ranks(rank_case.size, body, {.timeout = kTestTimeout});
    return;
  }
  if (mpi_world == nullptr || mpi_world->size() != rank_case.size) {
    throw std::logic_error("the MPI world does not have the size of the test");
  }
  // A test that fails on one rank only must not let the others run ahead into the next test.
  mpi_world->barrier();
  body(*mpi_world);
  mpi_world->barrier();
}

void Outcome::expect_same(std::size_t num_ranks) const {
  EXPECT_EQ(messages.size(), num_ranks);
  for (const auto& [rank, message] : messages) {
    EXPECT_EQ(message, messages.begin()->second) << "rank " << rank;
    EXPECT_EQ(named.at(rank), named.begin()->second) << "rank " << rank;
  }
}

Outcome outcome_of(int num_ranks, std::chrono::milliseconds timeout,
                   const std::function<void(Communicator&)>& body) {
  Outcome outcome;
  std::mutex mutex;
  const auto begin = std::chrono::steady_clock::now();
  try {
    run_ranks(num_ranks,
              [&](Communicator& comm) {
                try {
                  body(comm);
                } catch (const CommunicationError& error) {
                  const std::scoped_lock lock(mutex);
                  outcome.messages[comm.rank()] = error.what();
                  outcome.named[comm.rank()] = error.ranks();
                  throw;
                }
              },
              {.timeout = timeout});
  } catch (const std::exception& error) {
    outcome.reported = error.what();
  }
  outcome.time = std::chrono::steady_clock::now() - begin;
  return outcome;
}

std::vector<MoverKind> movers_of(Communicator& comm) {
  if (comm.size() == 1) return {MoverKind::direct, MoverKind::packed};
  if (comm.mapped_buffers() == nullptr) return {MoverKind::packed, MoverKind::peer};
  return {MoverKind::direct, MoverKind::packed, MoverKind::peer};
}

}  // namespace switchyard::testing
