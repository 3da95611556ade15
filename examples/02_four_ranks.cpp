// SPDX-License-Identifier: Apache-2.0
// Runs four ranks as threads, each with its own tokens and two of the eight experts.
#include <cstdio>

#include "switchyard/switchyard.h"

using namespace switchyard;

int main() {
  run_ranks(4, [](Communicator& comm) {
    Dispatcher yard(comm, ExpertPlacement::contiguous(8, comm.size()), {.plan = {.hidden = 16}});

    // Ranks may have different numbers of tokens, including none.
    const std::int64_t num_tokens = 3 * comm.rank();
    const Tensor x = Tensor::zeros({num_tokens, 16}, Dtype::f32);
    Tensor expert_ids({num_tokens, 2}, Dtype::i32);  // normally from a router; here round-robin
    Tensor weights({num_tokens, 2}, Dtype::f32);
    for (std::size_t i = 0; i < expert_ids.span<std::int32_t>().size(); ++i) {
      expert_ids.span<std::int32_t>()[i] = static_cast<std::int32_t>(i % 8);
      weights.span<float>()[i] = 0.5F;
    }

    const Plan plan = yard.plan(expert_ids);
    Tensor rows = yard.dispatch(plan, x);
    // Run expert i of this rank on rows row_offsets[i] … row_offsets[i + 1] − 1, in place.
    const Tensor y = yard.combine(plan, rows, weights);

    std::printf("rank %d: %lld tokens, %lld rows for its experts\n", comm.rank(),
                static_cast<long long>(num_tokens), static_cast<long long>(plan.num_rows()));
  });
}
