// SPDX-License-Identifier: Apache-2.0
// Plans and dispatches on a single rank, and prints where dispatch puts the rows.
#include <cstdio>

#include "switchyard/switchyard.h"

using namespace switchyard;

int main() {
  const auto world = connect();  // a world of one rank

  // Three experts. Each expert's group of rows starts at a multiple of 2.
  Dispatcher dispatcher(*world, ExpertPlacement::contiguous(3, world->size()),
                        {.plan = {.hidden = 1, .alignment = 2}});

  // Three tokens of one element, with two picks each.
  const Tensor x = Tensor::from<float>({3, 1}, {10, 11, 12});
  const Tensor expert_ids = Tensor::from<std::int32_t>({3, 2}, {0, 2, 1, 0, 2, 1});
  const Tensor weights = Tensor::from<float>({3, 2}, {0.5, 0.5, 0.25, 0.75, 1.0, 0.0});

  const Plan plan = dispatcher.plan(expert_ids);
  const Tensor rows = dispatcher.dispatch(plan, x);
  const auto offsets = plan.row_offsets().span<std::int32_t>();
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    std::printf("expert %zu:", e);
    for (auto r = static_cast<std::size_t>(offsets[e]);
         r < static_cast<std::size_t>(offsets[e + 1]); ++r) {
      std::printf(" %g", rows.span<float>()[r]);
    }
    std::printf("\n");
  }

  // The experts do nothing and the weights add up to 1, so combine returns the tokens.
  const Tensor y = dispatcher.combine(plan, rows, weights);
  for (const float value : y.span<float>()) std::printf("%g ", value);
  std::printf("\n");
}
