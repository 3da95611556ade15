// SPDX-License-Identifier: Apache-2.0
// Plans in tensors of the caller's: what they move, and how little they need.
#include <gtest/gtest.h>

#include "support/compare.h"
#include "support/errors.h"
#include "support/random.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::tensor_plan_test {
namespace {

using testing::error_of;
using testing::Random;
using testing::same_bits;

constexpr std::int64_t kHidden = 24;
constexpr std::int64_t kTopK = 3;
constexpr int kExperts = 10;

// The tokens of this rank; rank 1 has none.
struct Tokens {
  explicit Tokens(int rank) {
    Random random(static_cast<std::uint64_t>(70 + rank));
    const std::int64_t count = rank == 1 ? 0 : 12 + 5 * rank;
    x = random.tensor({count, kHidden}, Dtype::f32);
    weights = random.tensor({count, kTopK}, Dtype::f32);
    ids = random.expert_ids({count, kTopK, kExperts, 0.5, 0.2});
  }
  Tensor x, weights, ids;
};

Dispatcher dispatcher_over(Communicator& comm, const Sizing& sizing, MoverKind mover) {
  return {comm, ExpertPlacement::contiguous(kExperts, comm.size()),
          DispatcherOptions{.plan = {.hidden = kHidden, .alignment = 2, .sizing = sizing},
                            .mover = mover}};
}

Tensor memory_for(Communicator& comm, std::int64_t num_tokens) {
  return Tensor({Dispatcher::plan_words(ExpertPlacement::contiguous(kExperts, comm.size()),
                                        comm.rank(), num_tokens, kTopK)},
                Dtype::i32);
}

PlanForm form_of(const Tokens& own, const Sizing& sizing) {
  return {.num_tokens = own.x.shape()[0],
          .top_k = kTopK,
          .hidden = kHidden,
          .num_rows = sizing.capacity(),
          .num_received = sizing.token_capacity()};
}

class TensorPlanTest : public ::testing::TestWithParam<int> {};

TEST_P(TensorPlanTest, CopiesMoveWhatThePlanMoves) {
  run_ranks(GetParam(), [](Communicator& comm) {
    for (const Sizing& sizing : {Sizing::exact(), Sizing::bounded(400, Overflow::fail, 150)}) {
      Dispatcher dispatcher = dispatcher_over(comm, sizing, MoverKind::peer);
      const Tokens own(comm.rank());
      const Plan plan = dispatcher.plan(own.ids);
      const Tensor rows = dispatcher.dispatch(plan, own.x);
      Tensor memory = memory_for(comm, own.x.shape()[0]);
      dispatcher.plan_into(own.ids, memory);
      PlanForm form = form_of(own, sizing);
      if (!sizing.is_bounded()) form = dispatcher.complete(memory, form);
      EXPECT_EQ(form.num_rows, plan.row_capacity());
      Tensor copy = Tensor::from<std::int32_t>(memory.shape(), memory.span<std::int32_t>());
      std::ranges::fill(memory.span<std::int32_t>(), -7);
      const Plan read = dispatcher.plan_in(copy, form);
      EXPECT_TRUE(same_bits(read.slots(), plan.slots()));
      EXPECT_TRUE(same_bits(read.row_offsets(), plan.row_offsets()));
      const auto used = [&](const Tensor& all) { return all.view().slice(0, plan.num_rows()); };
      EXPECT_TRUE(same_bits(used(dispatcher.dispatch(read, own.x)), used(rows)));
      EXPECT_TRUE(same_bits(dispatcher.combine(read, rows, own.weights),
                            dispatcher.combine(plan, rows, own.weights)));
      const Tensor wide = Random(5).tensor({own.x.shape()[0], 40}, Dtype::bf16);
      form.hidden = 40;
      form.dtype = Dtype::bf16;
      EXPECT_EQ(dispatcher.dispatch(dispatcher.plan_in(copy, form), wide).shape(),
                (Shape{form.num_rows, 40}));
    }
  });
}

// Gradients of received weights return to the token's rank, as those of rows do.
TEST_P(TensorPlanTest, GradientsOfReceivedWeightsComeHome) {
  run_ranks(GetParam(), [](Communicator& comm) {
    Dispatcher dispatcher = dispatcher_over(comm, {}, MoverKind::peer);
    const Tokens own(comm.rank());
    const Plan plan = dispatcher.plan(own.ids);
    const ReceivedTokens received = dispatcher.receive(plan, own.x, own.weights);
    const TensorView d_received = dispatcher.take_received_weights(plan);
    const ConstTensorView again = dispatcher.receive(plan, own.x);
    EXPECT_TRUE(same_bits(again, received.tokens));
    std::ranges::copy(received.weights.span<float>(), d_received.span<float>().begin());
    const TensorView rows = dispatcher.take_rows(plan);
    Tensor d_x(own.x.shape(), Dtype::f32);
    Tensor d_weights(own.weights.shape(), Dtype::f32);
    dispatcher.dispatch_backward(plan, {.d_rows = rows, .d_received_weights = d_received},
                                 {.d_x = d_x, .d_weights = d_weights.view()});
    const auto ids = own.ids.span<std::int32_t>();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const float expected = ids[i] < 0 ? 0.0F : own.weights.span<float>()[i];
      EXPECT_EQ(d_weights.span<float>()[i], expected) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, TensorPlanTest, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

TEST(TensorPlan, BadIdsAreTheSameErrorOnEveryRankAndTheNextPlanWorks) {
  run_ranks(3, [](Communicator& comm) {
    Dispatcher dispatcher = dispatcher_over(comm, {}, MoverKind::peer);
    Tensor ids = Tensor::from<std::int32_t>({1, kTopK}, {0, 1, comm.rank() == 1 ? kExperts : 2});
    Tensor memory = memory_for(comm, 1);
    const PlanForm form{.num_tokens = 1, .top_k = kTopK, .hidden = kHidden};
    dispatcher.plan_into(ids, memory);
    const auto error = error_of<InvalidArgument>([&] { (void)dispatcher.complete(memory, form); });
    EXPECT_NE(error.find("rank 1: expert_ids[0,2] is 10"), std::string::npos) << error;
    ids.span<std::int32_t>()[2] = 2;
    dispatcher.plan_into(ids, memory);
    EXPECT_EQ(dispatcher.complete(memory, form).num_received > 0,
              comm.rank() == 0);  // where experts 0, 1 and 2 are
  });
}

TEST(TensorPlan, OverflowIsRecordedInTheTensor) {
  run_ranks(2, [](Communicator& comm) {
    const Sizing sizing = Sizing::bounded(4);
    Dispatcher dispatcher = dispatcher_over(comm, sizing, MoverKind::peer);
    const Tensor ids = Tensor::from<std::int32_t>({2, kTopK}, {0, 1, 2, 0, 1, 2});
    Tensor memory = memory_for(comm, 2);
    dispatcher.plan_into(ids, memory);
    const Plan plan = dispatcher.plan_in(
        memory, {.num_tokens = 2, .top_k = kTopK, .hidden = kHidden, .num_rows = 4});
    EXPECT_TRUE(plan.status().overflow);
    EXPECT_EQ(plan.status().needed_rows, (std::vector<std::int64_t>{12, 0}));
  });
}

TEST(TensorPlan, MemoryOfAnotherSizeAndOtherMoversAreRefused) {
  run_ranks(2, [](Communicator& comm) {
    Dispatcher dispatcher = dispatcher_over(comm, {}, MoverKind::peer);
    Tensor memory = memory_for(comm, 1);
    const PlanForm two{.num_tokens = 2, .top_k = kTopK, .hidden = kHidden};
    comm.barrier();
    const auto error = error_of<InvalidArgument>([&] { (void)dispatcher.plan_in(memory, two); });
    EXPECT_NE(error.find("for 2 tokens with 3 picks each"), std::string::npos) << error;
  });
  run_ranks(2, [](Communicator& comm) {
    Dispatcher dispatcher = dispatcher_over(comm, {}, MoverKind::packed);
    Tensor memory = memory_for(comm, 1);
    const Tensor ids = Tensor::from<std::int32_t>({1, kTopK}, {0, 1, 2});
    const auto error = error_of<Error>([&] { dispatcher.plan_into(ids, memory); });
    EXPECT_NE(error.find("the peer mover"), std::string::npos) << error;
  });
  const auto error = error_of<InvalidArgument>(
      [] { (void)Dispatcher::plan_words(ExpertPlacement::contiguous(4, 2), 2, 1, 1); });
  EXPECT_NE(error.find("rank (2) must be one of 2"), std::string::npos) << error;
}

}  // namespace
}  // namespace switchyard::tensor_plan_test
