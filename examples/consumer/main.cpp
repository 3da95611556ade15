// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "switchyard/switchyard.h"

int main() {
  using namespace switchyard;
  run_ranks(2, [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(4, 2), {.plan = {.hidden = 8}});
    const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({2, 1}, {comm.rank(), 3}));
    const Tensor rows = dispatcher.dispatch(plan, Tensor::zeros({2, 8}, Dtype::f32));
    std::printf("rank %d holds %lld rows\n", comm.rank(), static_cast<long long>(rows.rows()));
  });
}
