// SPDX-License-Identifier: Apache-2.0
// Dispatches rows between MPI processes: mpirun -n 4 03_processes. If a rank dies, the errors of
// the others name it.
#include <cstdio>

#include "switchyard/switchyard.h"

using namespace switchyard;

int main() {
  try {
    const auto world = connect({.backend = "mpi", .timeout = std::chrono::seconds(30)});
    Mesh mesh(*world, {{"dp", 1}, {"ep", world->size()}});
    Communicator& ep = mesh.comm({"ep"});
    Dispatcher dispatcher(ep, ExpertPlacement::contiguous(8, ep.size()), {.plan = {.hidden = 16}});
    const Plan plan = dispatcher.plan(Tensor::zeros({4, 1}, Dtype::i32));  // all go to expert 0
    const Tensor rows = dispatcher.dispatch(plan, Tensor::zeros({4, 16}, Dtype::f32));
    std::printf("rank %d of %d received %lld rows\n", ep.rank(), ep.size(),
                static_cast<long long>(plan.num_rows()));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
