// SPDX-License-Identifier: Apache-2.0
// Tokens that a rank receives once, in place of rows: every row's source names what dispatch would
// have put there.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "support/compare.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::receive_test {
namespace {

using testing::error_of;
using testing::Random;
using testing::same_bits;

constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kTopK = 3;
constexpr int kExperts = 16;

DispatcherOptions options_with(const Sizing& sizing) {
  return {.plan = {.hidden = kHidden, .alignment = 4, .sizing = sizing}, .mover = MoverKind::peer};
}

// The tokens of this rank; rank 1 has none.
struct Tokens {
  explicit Tokens(int rank) {
    Random random(static_cast<std::uint64_t>(30 + rank));
    const std::int64_t count = rank == 1 ? 0 : 20 + 5 * rank;
    x = random.tensor({count, kHidden}, Dtype::f32);
    weights = random.tensor({count, kTopK}, Dtype::f32);
    ids = random.expert_ids({count, kTopK, kExperts, 0.5, 0.2});
  }
  Tensor x, weights, ids;
};

void expect_rows_of_dispatch(Dispatcher& dispatcher, const Plan& plan, const Tokens& own) {
  Tensor rows({plan.row_capacity(), kHidden}, Dtype::f32);
  Tensor row_weights({plan.row_capacity()}, Dtype::f32);
  dispatcher.dispatch(plan, {.x = own.x, .weights = own.weights},
                      {.rows = rows, .row_weights = row_weights});
  ASSERT_TRUE(dispatcher.receives_tokens(plan));
  const ReceivedTokens received = dispatcher.receive(plan, own.x, own.weights);
  const auto sources = received.row_sources.span<std::int32_t>();
  const auto weights = received.weights.span<float>();
  const auto offsets = plan.row_offsets().span<std::int32_t>();
  const auto group_rows = plan.group_rows().span<std::int32_t>();
  std::vector<bool> is_named(static_cast<std::size_t>(received.tokens.rows()));
  int num_wrong = 0;
  for (std::size_t e = 0; e < group_rows.size(); ++e) {
    for (std::int64_t r = offsets[e]; r < offsets[e] + group_rows[e]; ++r) {
      const auto source = static_cast<std::size_t>(sources[static_cast<std::size_t>(r)]);
      const auto token = static_cast<std::int64_t>(source) / kTopK;
      is_named.at(static_cast<std::size_t>(token)) = true;
      num_wrong += std::memcmp(received.tokens.row(token), rows.view().row(r),
                               static_cast<std::size_t>(rows.view().row_bytes())) != 0
                       ? 1
                       : 0;
      num_wrong +=
          weights[source] != row_weights.span<float>()[static_cast<std::size_t>(r)] ? 1 : 0;
    }
  }
  EXPECT_EQ(num_wrong, 0);
  if (plan.placement().num_ranks() == 1) return;
  std::int64_t distinct = 0;
  for (int r = 0; r < plan.placement().num_ranks(); ++r) {
    distinct += plan.distinct_tokens(r, plan.rank());
  }
  EXPECT_EQ(std::accumulate(is_named.begin(), is_named.end(), std::int64_t{0}), distinct);
  if (!plan.options().sizing.is_bounded()) {
    EXPECT_EQ(received.tokens.rows(), distinct);
  }
}

class ReceiveTest : public ::testing::TestWithParam<int> {};

TEST_P(ReceiveTest, RowsNameTheTokensThatDispatchPutsThere) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (const Sizing& sizing :
         {Sizing::exact(), Sizing::bounded(800), Sizing::bounded(800, Overflow::fail, 300)}) {
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(kExperts, comm.size()),
                            options_with(sizing));
      const Tokens own(comm.rank());
      for (int round = 0; round < 3; ++round) {
        const Plan plan = dispatcher.plan(own.ids);
        expect_rows_of_dispatch(dispatcher, plan, own);
      }
    }
  });
}

// Rows of the dispatcher's own memory, made of tokens, come home as those of the caller do.
TEST_P(ReceiveTest, RowsThatAreTakenComeHome) {
  run_ranks(GetParam(), [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(kExperts, comm.size()),
                          options_with({}));
    const Tokens own(comm.rank());
    for (int round = 0; round < 3; ++round) {
      const Plan plan = dispatcher.plan(own.ids);
      const TensorView taken = dispatcher.take_rows(plan);
      EXPECT_EQ(taken.shape(), (Shape{plan.row_capacity(), kHidden}));
      (void)dispatcher.receive(plan, own.x, own.weights);
      const Tensor rows = Random(static_cast<std::uint64_t>(60 + 8 * round + comm.rank()))
                              .tensor(taken.shape(), Dtype::f32);
      std::memcpy(taken.data(), rows.data(), static_cast<std::size_t>(rows.bytes()));
      Tensor y(own.x.shape(), Dtype::f32);
      dispatcher.combine(plan, {.rows = taken, .weights = own.weights}, y);
      EXPECT_TRUE(same_bits(y, dispatcher.combine(plan, rows, own.weights)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, ReceiveTest, ::testing::Values(1, 2, 3, 8),
                         ::testing::PrintToStringParamName());

TEST(Receive, IsForPlansThatDropNothing) {
  for (const MoverKind mover : {MoverKind::direct, MoverKind::packed, MoverKind::peer}) {
    run_ranks(2, [mover](Communicator& comm) {
      auto options = options_with(Sizing::bounded(800, Overflow::drop));
      options.mover = mover;
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(kExperts, 2), options);
      const Tokens own(0);
      const Plan plan = dispatcher.plan(own.ids);
      EXPECT_FALSE(dispatcher.receives_tokens(plan));
      EXPECT_EQ(dispatcher.take_rows(plan).rows(), 800);
      comm.barrier();
      const auto error =
          error_of<Error>([&] { (void)dispatcher.receive(plan, own.x, own.weights); });
      EXPECT_NE(error.find("use dispatch unless receives_tokens() is true"), std::string::npos)
          << error;
    });
  }
}

}  // namespace
}  // namespace switchyard::receive_test
