#include "support/ranks.h"

#include <cstdlib>
#include <ostream>
#include <stdexcept>

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
  // A test that fails on one rank alone must not let the others run ahead into the next.
  mpi_world->barrier();
  body(*mpi_world);
  mpi_world->barrier();
}

std::vector<MoverKind> movers_of(Communicator& comm) {
  if (comm.size() == 1) return {MoverKind::direct, MoverKind::packed};
  if (comm.mapped_buffers() == nullptr) return {MoverKind::packed, MoverKind::peer};
  return {MoverKind::direct, MoverKind::packed, MoverKind::peer};
}

}  // namespace switchyard::testing
