// SPDX-License-Identifier: Apache-2.0
// The worked example of docs/data-layout.md, number for number.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "switchyard/dispatcher.h"
#include "switchyard/run_ranks.h"

namespace switchyard::layout_example_test {
namespace {

using testing::same_bits;

Tensor ints(const Shape& shape, std::initializer_list<std::int32_t> values) {
  return Tensor::from<std::int32_t>(shape, values);
}

TEST(LayoutExample, IsWhatTheDocsSay) {
  for (const MoverKind mover : {MoverKind::direct, MoverKind::packed}) {
    run_ranks(2, [&](Communicator& comm) {
      const bool first = comm.rank() == 0;
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(3, 2),
                            {.plan = {.hidden = 1, .alignment = 2}, .mover = mover});
      const Tensor ids = first ? ints({3, 2}, {0, 2, 1, 0, 2, 1}) : ints({2, 2}, {1, 2, 0, -1});
      const Tensor x =
          first ? Tensor::from<float>({3, 1}, {10, 11, 12}) : Tensor::from<float>({2, 1}, {20, 21});
      const Plan plan = dispatcher.plan(ids);

      EXPECT_TRUE(same_bits(Tensor::from<std::int32_t>({3}, plan.counts(0)), ints({3}, {2, 2, 2})));
      EXPECT_TRUE(same_bits(Tensor::from<std::int32_t>({3}, plan.counts(1)), ints({3}, {1, 1, 1})));
      EXPECT_EQ(plan.distinct_tokens(0, 0), 3);
      EXPECT_EQ(plan.distinct_tokens(0, 1), 2);
      EXPECT_EQ(plan.distinct_tokens(1, 0), 2);
      EXPECT_EQ(plan.distinct_tokens(1, 1), 1);

      EXPECT_TRUE(same_bits(plan.row_offsets(), first ? ints({3}, {0, 4, 8}) : ints({2}, {0, 4})));
      EXPECT_TRUE(same_bits(plan.group_rows(), first ? ints({2}, {3, 3}) : ints({1}, {3})));
      EXPECT_TRUE(same_bits(
          plan.slots(), first ? ints({3, 2}, {0, 0, 4, 1, 1, 5}) : ints({2, 2}, {6, 2, 2, -1})));
      EXPECT_TRUE(same_bits(plan.target_ranks(), first ? ints({3, 2}, {0, 1, 0, 0, 1, 0})
                                                       : ints({2, 2}, {0, 1, 0, -1})));
      EXPECT_TRUE(
          same_bits(plan.sources(), first ? ints({6}, {0, 3, 2, 5, 1, 4}) : ints({3}, {2, 0, 1})));

      const Tensor rows = dispatcher.dispatch(plan, x);
      EXPECT_TRUE(same_bits(rows, first
                                      ? Tensor::from<float>({8, 1}, {10, 11, 21, 0, 11, 12, 20, 0})
                                      : Tensor::from<float>({4, 1}, {10, 12, 20, 0})));

      const Tensor weights = first ? Tensor::from<float>({3, 2}, {0.5, 0.5, 0.25, 0.75, 1, 0})
                                   : Tensor::from<float>({2, 2}, {0.5, 0.5, 1, 0});
      EXPECT_TRUE(same_bits(dispatcher.combine(plan, rows, weights), x));
    });
  }
}

}  // namespace
}  // namespace switchyard::layout_example_test
