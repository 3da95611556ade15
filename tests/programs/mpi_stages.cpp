// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job that goes through every stage once: MPI_Init, connect, split, and a step
// of training with a checkpoint. mpi_grief.cpp ends a rank anywhere in it. Every rank writes what
// it saw to DIR/rank<N>, and its pid to DIR/pid<N>.
//   mpi_stages DIR TIMEOUT_MS [GROUPS]     GROUPS: how many groups to split off, instead of one,
//                                          with few descriptors left
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "support/mpi_rank.h"
#include "support/training_step.h"
#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;

// Descriptors for so many more than are open, and no others.
void leave_descriptors(int count) {
  const int next = ::dup(0);
  ::close(next);
  const rlimit few{static_cast<rlim_t>(next + count), static_cast<rlim_t>(next + count)};
  ::setrlimit(RLIMIT_NOFILE, &few);
}

}  // namespace

int main(int argc, char** argv) {
  const std::filesystem::path folder = argv[1];
  const int rank = std::atoi(std::getenv("OMPI_COMM_WORLD_RANK"));
  testing::write_pid(folder, rank, ::getpid());
  testing::write_what_happens(folder, rank, nullptr, [&]() -> std::string {
    const auto comm = connect({.backend = "mpi",
                               .timeout = std::chrono::milliseconds(std::atoi(argv[2])),
                               .exit_if_init_hangs = true});
    if (argc > 3) leave_descriptors(12);
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int g = 0; g < (argc > 3 ? std::atoi(argv[3]) : 1); ++g) {
      groups.push_back(comm->split(0, 0));
    }
    (void)testing::train_a_step(*groups.back(), MoverKind::packed, folder / "checkpoint");
    return "no error";
  });
  return 0;
}
