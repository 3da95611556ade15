// SPDX-License-Identifier: Apache-2.0
#include "switchyard/dispatcher.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/compare.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/reference/reference.h"
#include "switchyard/run_ranks.h"

namespace switchyard::dispatcher_test {
namespace {

using testing::movers_of;
using testing::near;
using testing::on_ranks;
using testing::poison;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr std::int64_t kHidden = 24;

DispatcherOptions options_for(MoverKind mover, Dtype dtype = Dtype::f32) {
  return {.plan = {.hidden = kHidden, .dtype = dtype}, .mover = mover};
}

Tensor random_ids(Communicator& comm, std::int64_t num_tokens, std::int64_t top_k, int experts) {
  Random random(static_cast<std::uint64_t>(40 + comm.rank()));
  return random.expert_ids({num_tokens, top_k, experts});
}

class DispatcherTest : public ::testing::TestWithParam<RankCase> {};

// Experts that do nothing and weights 1/K give back the input and its gradient. With K = 4 both
// are exact.
TEST_P(DispatcherTest, IdentityExpertsGiveBackTheInput) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        Dispatcher dispatcher(comm, ExpertPlacement::contiguous(11, comm.size()),
                              options_for(mover, dtype));
        const std::int64_t num_tokens = 5 * comm.rank();  // rank 0 has none
        const Plan plan = dispatcher.plan(random_ids(comm, num_tokens, 4, 11));
        const Tensor x = Random(7).tensor({num_tokens, kHidden}, dtype);
        Tensor weights({num_tokens, 4}, Dtype::f32);
        for (float& w : weights.span<float>()) w = 0.25F;
        Tensor rows = dispatcher.dispatch(plan, x);
        EXPECT_TRUE(same_bits(dispatcher.combine(plan, rows, weights), x));

        Tensor d_x({num_tokens, kHidden}, dtype);
        dispatcher.combine_backward(plan, {.d_y = x, .weights = weights}, {.d_rows = rows});
        dispatcher.dispatch_backward(plan, {.d_rows = rows}, {.d_x = d_x});
        EXPECT_TRUE(same_bits(d_x, x));
      }
    }
  });
}

// ⟨combine(rows), d_y⟩ = ⟨rows, combine_backward(d_y)⟩ and likewise for dispatch: the adjoints.
TEST_P(DispatcherTest, BackwardsAreAdjoint) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto dot = [&](const Tensor& a, const Tensor& b) {
      double sum = 0.0;
      for (std::size_t i = 0; i < a.span<float>().size(); ++i) {
        sum += static_cast<double>(a.span<float>()[i]) * b.span<float>()[i];
      }
      Tensor total = Tensor::from<float>({1}, {static_cast<float>(sum)});
      comm.all_reduce(total);
      return total.span<float>()[0];
    };
    for (const MoverKind mover : movers_of(comm)) {
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(6, comm.size()), options_for(mover));
      Random random(static_cast<std::uint64_t>(3 + comm.rank()));
      const std::int64_t num_tokens = 3 + comm.rank();
      const Plan plan = dispatcher.plan(random_ids(comm, num_tokens, 3, 6));
      const Tensor x = random.tensor({num_tokens, kHidden}, Dtype::f32);
      const Tensor d_y = random.tensor({num_tokens, kHidden}, Dtype::f32);
      const Tensor weights = random.tensor({num_tokens, 3}, Dtype::f32);
      const Tensor rows = random.tensor({plan.num_rows(), kHidden}, Dtype::f32);
      Tensor d_rows({plan.num_rows(), kHidden}, Dtype::f32);
      Tensor d_x({num_tokens, kHidden}, Dtype::f32);
      dispatcher.combine_backward(plan, {.d_y = d_y, .weights = weights}, {.d_rows = d_rows});
      EXPECT_NEAR(dot(dispatcher.combine(plan, rows, weights), d_y), dot(rows, d_rows), 1e-3);
      dispatcher.dispatch_backward(plan, {.d_rows = rows}, {.d_x = d_x});
      EXPECT_NEAR(dot(dispatcher.dispatch(plan, x), rows), dot(x, d_x), 1e-3);
    }
  });
}

// d_weights of combine by finite differences: combine is linear in the weights.
TEST_P(DispatcherTest, WeightGradientsMatchFiniteDifferences) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(5, comm.size()), options_for(mover));
      Random random(static_cast<std::uint64_t>(9 + comm.rank()));
      const Plan plan = dispatcher.plan(random_ids(comm, 4, 2, 5));
      const Tensor rows = random.tensor({plan.num_rows(), kHidden}, Dtype::f32);
      const Tensor d_y = random.tensor({4, kHidden}, Dtype::f32);
      Tensor weights = random.tensor({4, 2}, Dtype::f32);
      Tensor d_rows({plan.num_rows(), kHidden}, Dtype::f32);
      Tensor d_weights({4, 2}, Dtype::f32);
      dispatcher.combine_backward(plan, {.d_y = d_y, .weights = weights, .rows = rows},
                                  {.d_rows = d_rows, .d_weights = d_weights});
      const auto loss = [&] {
        const Tensor y = dispatcher.combine(plan, rows, weights);
        double sum = 0.0;
        for (std::size_t i = 0; i < y.span<float>().size(); ++i) {
          sum += static_cast<double>(y.span<float>()[i]) * d_y.span<float>()[i];
        }
        return sum;
      };
      for (std::size_t i = 0; i < 8; ++i) {
        const float before = weights.span<float>()[i];
        weights.span<float>()[i] = before + 0.5F;
        const double high = loss();
        weights.span<float>()[i] = before - 0.5F;
        const double low = loss();
        weights.span<float>()[i] = before;
        EXPECT_NEAR(d_weights.span<float>()[i], high - low, 1e-4);
      }
    }
  });
}

TEST_P(DispatcherTest, PreReducedCombineIsCloseAndSendsLess) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      auto options = options_for(MoverKind::packed, dtype);
      Dispatcher exact(comm, ExpertPlacement::contiguous(8, comm.size()), options);
      options.combine = CombineMode::pre_reduced;
      Dispatcher reduced(comm, ExpertPlacement::contiguous(8, comm.size()), options);
      const Tensor ids = random_ids(comm, 20, 6, 8);
      const Plan plan = exact.plan(ids);
      const Plan reduced_plan = reduced.plan(ids);
      Random random(static_cast<std::uint64_t>(comm.rank()));
      const Tensor rows = random.tensor({plan.num_rows(), kHidden}, dtype);
      const Tensor weights = random.tensor({20, 6}, Dtype::f32);
      const auto exact_before = exact.bytes_on_wire();
      const auto reduced_before = reduced.bytes_on_wire();
      const Tensor y = exact.combine(plan, rows, weights);
      const Tensor y_reduced = reduced.combine(reduced_plan, rows, weights);
      EXPECT_TRUE(near(y_reduced, y, dtype == Dtype::f32 ? 1e-6 : 1e-2));
      Tensor d_x({20, kHidden}, dtype);
      Tensor d_x_reduced({20, kHidden}, dtype);
      exact.dispatch_backward(plan, {.d_rows = rows}, {.d_x = d_x});
      reduced.dispatch_backward(reduced_plan, {.d_rows = rows}, {.d_x = d_x_reduced});
      EXPECT_TRUE(near(d_x_reduced, d_x, dtype == Dtype::f32 ? 1e-6 : 1e-2));
      if (comm.size() > 1 && comm.size() < 4) {  // where tokens share ranks
        EXPECT_LT(reduced.bytes_on_wire() - reduced_before, exact.bytes_on_wire() - exact_before);
      }
    }
  });
}

TEST_P(DispatcherTest, PackedSendsATokenToARankOnce) {
  on_ranks(GetParam(), [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(4 * comm.size(), comm.size()),
                          options_for(MoverKind::packed));
    // Every token picks the four experts of the next rank.
    const int next = (comm.rank() + 1) % comm.size();
    Tensor ids({3, 4}, Dtype::i32);
    for (std::size_t i = 0; i < 12; ++i) {
      ids.span<std::int32_t>()[i] = next * 4 + static_cast<std::int32_t>(i % 4);
    }
    const Plan plan = dispatcher.plan(ids);
    const auto before = dispatcher.bytes_on_wire();
    Tensor rows = dispatcher.dispatch(plan, Random(1).tensor({3, kHidden}, Dtype::f32));
    const std::int64_t token_bytes = kHidden * 4;
    EXPECT_EQ(dispatcher.bytes_on_wire() - before, comm.size() == 1 ? 0 : 3 * token_bytes);
    EXPECT_EQ(rows.rows(), 12);
  });
}

// Fewer, more or no rows, strided tokens, a bounded plan with tail rows that nobody may touch.
TEST_P(DispatcherTest, LeavesTailRowsAloneAndTakesStridedTokens) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      auto options = options_for(mover);
      options.plan.alignment = 8;
      Dispatcher exact(comm, ExpertPlacement::contiguous(3, comm.size()), options);
      options.plan.sizing = Sizing::bounded(256);
      Dispatcher bounded(comm, ExpertPlacement::contiguous(3, comm.size()), options);
      const Tensor ids = random_ids(comm, 6, 2, 3);
      const Plan exact_plan = exact.plan(ids);
      const Plan plan = bounded.plan(ids);
      Tensor wide = Random(static_cast<std::uint64_t>(comm.rank())).tensor({6, 32}, Dtype::f32);
      const TensorView x(wide.data(), Dtype::f32, {6, kHidden}, 32);
      Tensor rows({256, kHidden}, Dtype::f32);
      poison(rows);
      const Tensor poisoned = rows.clone();
      bounded.dispatch(plan, {.x = x}, {.rows = rows});
      EXPECT_TRUE(same_bits(rows.view().slice(0, plan.num_rows()), exact.dispatch(exact_plan, x)));
      EXPECT_TRUE(same_bits(rows.view().slice(plan.num_rows(), 256),
                            poisoned.view().slice(plan.num_rows(), 256)));
    }
  });
}

// Rows that do not fit are not moved, wherever they come from, and cost nobody else anything.
TEST_P(DispatcherTest, OverflowNeverWritesBeyondTheCapacity) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      for (const Overflow policy : {Overflow::fail, Overflow::drop}) {
        auto options = options_for(mover);
        options.plan.sizing = Sizing::bounded(5, policy, 32);
        Dispatcher dispatcher(comm, ExpertPlacement::contiguous(2, comm.size()), options);
        Tensor ids = Tensor::zeros({4, 1}, Dtype::i32);  // all to expert 0 on rank 0
        const Plan plan = dispatcher.plan(ids);
        Tensor x({4, kHidden}, Dtype::f32);
        for (float& v : x.span<float>()) v = static_cast<float>(1 + comm.rank());
        Tensor rows({6, kHidden}, Dtype::f32);
        poison(rows);
        const Tensor poisoned = rows.clone();
        dispatcher.dispatch(plan, {.x = x}, {.rows = rows});
        EXPECT_TRUE(same_bits(rows.view().slice(5, 6), poisoned.view().slice(5, 6)));
        Tensor ones({4, 1}, Dtype::f32);
        for (float& v : ones.span<float>()) v = 1.0F;
        const Tensor y = dispatcher.combine(plan, rows, ones);
        for (std::int64_t t = 0; t < 4; ++t) {
          const bool kept = comm.rank() * 4 + t < 5;  // the first five tokens of the whole
          EXPECT_EQ(y.span<float>()[static_cast<std::size_t>(t * kHidden)],
                    kept ? static_cast<float>(1 + comm.rank()) : 0.0F);
        }
        EXPECT_EQ(plan.status().dropped[0], std::max(0, 4 * comm.size() - 5));
      }
    }
  });
}

// Two experts a rank, with room for five of the rows that rank 0 is asked to take.
TEST_P(DispatcherTest, DroppedAssignmentsAreNeitherSentNorCounted) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const std::int64_t row_bytes = kHidden * 4;
    for (const MoverKind mover : movers_of(comm)) {
      for (const Overflow policy : {Overflow::fail, Overflow::drop}) {
        auto options = options_for(mover);
        options.plan.sizing = Sizing::bounded(5, policy, 32);
        Dispatcher dispatcher(comm, ExpertPlacement::contiguous(2 * comm.size(), comm.size()),
                              options);
        const Plan plan = dispatcher.plan(Tensor::zeros({4, 1}, Dtype::i32));
        const int kept = std::clamp(5 - 4 * comm.rank(), 0, 4);
        const auto expected = comm.rank() == 0 ? 0 : kept * row_bytes;
        auto before = dispatcher.bytes_on_wire();
        const Tensor rows = dispatcher.dispatch(plan, Tensor::zeros({4, kHidden}, Dtype::f32));
        EXPECT_EQ(dispatcher.bytes_on_wire() - before, expected) << comm.rank();
        before = dispatcher.bytes_on_wire();
        dispatcher.combine(plan, rows, Tensor::zeros({4, 1}, Dtype::f32));
        const auto returned = comm.rank() == 0 && comm.size() > 1 ? row_bytes : 0;
        EXPECT_EQ(dispatcher.bytes_on_wire() - before,
                  mover == MoverKind::packed ? returned : expected);
      }
    }
  });
}

TEST_P(DispatcherTest, DuplicateIdsMoveTwice) {
  on_ranks(GetParam(), [](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      auto options = options_for(mover);
      options.plan.duplicate_ids = DuplicateIds::allow;
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(comm.size(), comm.size()), options);
      Tensor ids({2, 3}, Dtype::i32);
      for (auto& id : ids.span<std::int32_t>()) id = (comm.rank() + 1) % comm.size();
      const Plan plan = dispatcher.plan(ids);
      EXPECT_EQ(plan.num_rows(), 6);
      const Tensor x = Random(2).tensor({2, kHidden}, Dtype::f32);
      const Tensor rows = dispatcher.dispatch(plan, x);
      const Tensor weights = Tensor::from<float>({2, 3}, {0.5, 0.25, 0.25, 0.5, 0.25, 0.25});
      EXPECT_TRUE(same_bits(dispatcher.combine(plan, rows, weights), x));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DispatcherTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

// A rank without tokens and experts may hand over views of nothing at all.
TEST(Dispatcher, TakesForeignMemoryOfNothing) {
  for (const MoverKind mover : {MoverKind::direct, MoverKind::packed}) {
    run_ranks(2, [&](Communicator& comm) {
      Dispatcher dispatcher(comm, ExpertPlacement::from_owners({0, 0}, 2), options_for(mover));
      const std::int64_t n = comm.rank() == 0 ? 2 : 0;
      std::vector<float> x(static_cast<std::size_t>(n * kHidden), 3.0F);
      std::vector<float> rows(x.size());
      std::vector<float> weights(static_cast<std::size_t>(n), 1.0F);
      std::vector<float> row_weights(weights.size());
      std::vector<std::int32_t> ids(weights.size(), 1);
      const Plan plan = dispatcher.plan(ConstTensorView(ids.data(), {n, 1}));
      dispatcher.dispatch(plan,
                          {.x = ConstTensorView(x.data(), {n, kHidden}),
                           .weights = ConstTensorView(weights.data(), {n, 1})},
                          {.rows = TensorView(rows.data(), {n, kHidden}),
                           .row_weights = TensorView(row_weights.data(), {n})});
      EXPECT_EQ(rows, x);
      EXPECT_EQ(row_weights, weights);
    });
  }
}

// Transfers large enough to be written past the caches, and rows that do not allow it.
TEST(Dispatcher, LargeTransfersEqualTheReference) {
  for (const std::int64_t hidden : {2048, 2047}) {
    const auto placement = ExpertPlacement::contiguous(5, 2);
    std::vector<Tensor> ids;
    std::vector<Tensor> x;
    std::vector<Tensor> weights;
    for (std::uint64_t r = 0; r < 2; ++r) {
      Random random(r);
      ids.push_back(random.expert_ids({520, 3, 5}));
      x.push_back(random.tensor({520, hidden}, Dtype::f32));
      weights.push_back(random.tensor({520, 3}, Dtype::f32));
    }
    const testing::ReferencePlan reference(placement, ids, 1);
    std::vector<Tensor> rows;
    std::vector<Tensor> y;
    for (int r = 0; r < 2; ++r) {
      rows.push_back(testing::reference_scatter(reference, r, x, nullptr));
    }
    for (int r = 0; r < 2; ++r) {
      y.push_back(testing::reference_gather(reference, r, rows, &weights, Dtype::f32, hidden));
    }
    for (const MoverKind mover : {MoverKind::direct, MoverKind::packed}) {
      run_ranks(2, [&](Communicator& comm) {
        Dispatcher dispatcher(comm, placement, {.plan = {.hidden = hidden}, .mover = mover});
        const auto r = static_cast<std::size_t>(comm.rank());
        const Plan plan = dispatcher.plan(ids[r]);
        const Tensor moved = dispatcher.dispatch(plan, x[r]);
        EXPECT_TRUE(same_bits(moved, rows[r]));
        EXPECT_TRUE(same_bits(dispatcher.combine(plan, moved, weights[r]), y[r]));
      });
    }
  }
}

}  // namespace
}  // namespace switchyard::dispatcher_test
