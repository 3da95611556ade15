// SPDX-License-Identifier: Apache-2.0
// Thousands of random shapes, skews and placements against the reference.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "support/compare.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/reference/reference.h"
#include "switchyard/dispatcher.h"

namespace switchyard::movement_property_test {
namespace {

using testing::at;
using testing::poison;
using testing::Random;
using testing::RankCase;
using testing::ReferencePlan;
using testing::same_bits;
using testing::within;

// For each number of ranks.
#ifdef SWITCHYARD_SANITIZED
constexpr int kCases = 60;
#else
constexpr int kCases = 500;
#endif

ExpertPlacement random_placement(Random& random, int num_experts, int num_ranks) {
  if (random.below(2) == 0) return ExpertPlacement::contiguous(num_experts, num_ranks);
  std::vector<std::int32_t> owners;
  for (int e = 0; e < num_experts; ++e) {
    owners.push_back(static_cast<std::int32_t>(random.below(num_ranks)));
  }
  return ExpertPlacement::from_owners(std::move(owners), num_ranks);
}

// The inputs of all ranks, the same wherever they are made.
struct Case {
  Case(std::uint64_t seed, int num_ranks)
      : random(seed),
        num_experts(static_cast<int>(1 + random.below(12))),
        top_k(1 + random.below(10)),
        hidden(1 + random.below(40)),
        dtype(random.below(2) == 0 ? Dtype::f32 : Dtype::bf16),
        alignment(std::array{1, 2, 3, 8}[at(random.below(4))]),
        placement(random_placement(random, num_experts, num_ranks)) {
    const double skew = static_cast<double>(random.below(3)) / 2.0;
    const double none = random.below(2) == 0 ? 0.0 : 0.2;
    for (int r = 0; r < num_ranks; ++r) {
      const auto num_tokens = random.below(3) == 0 ? random.below(2) : random.below(20);
      ids.push_back(random.expert_ids({num_tokens, top_k, num_experts, skew, none}));
      x.push_back(random.tensor({num_tokens, hidden}, dtype));
      d_y.push_back(random.tensor({num_tokens, hidden}, dtype));
      weights.push_back(random.tensor({num_tokens, top_k}, Dtype::f32));
    }
  }

  // Random rows for all ranks; NaN in pad rows, which must not come back.
  std::vector<Tensor> rows_for(const ReferencePlan& plan) {
    std::vector<Tensor> result;
    for (const auto& buffer : plan.rows) {
      result.push_back(random.tensor({static_cast<std::int64_t>(buffer.size()), hidden}, dtype));
      for (std::size_t slot = 0; slot < buffer.size(); ++slot) {
        const auto row = static_cast<std::int64_t>(slot);
        if (!buffer[slot]) poison(result.back().view().slice(row, row + 1));
      }
    }
    return result;
  }

  Random random;
  int num_experts;
  std::int64_t top_k;
  std::int64_t hidden;
  Dtype dtype;
  std::int64_t alignment;
  ExpertPlacement placement;
  std::vector<Tensor> ids, x, d_y, weights;
};

void check_plan(const Plan& plan, const Tensor& ids, const ReferencePlan& reference) {
  const auto r = at(plan.rank());
  const auto as_vector = [](const ConstTensorView& view) {
    const auto span = view.span<std::int32_t>();
    return std::vector<std::int32_t>(span.begin(), span.end());
  };
  ASSERT_EQ(as_vector(plan.row_offsets()), reference.row_offsets[r]);
  ASSERT_EQ(as_vector(plan.group_rows()), reference.group_rows[r]);
  ASSERT_EQ(as_vector(plan.slots()), reference.slots[r]);
  ASSERT_EQ(as_vector(plan.target_ranks()), reference.owners[r]);
  ASSERT_EQ(plan.num_rows(), static_cast<std::int64_t>(reference.rows[r].size()));
  // The inverse map names this rank's assignments by expert, each expert's in order.
  const auto sources = as_vector(plan.sources());
  const auto offsets = as_vector(plan.source_offsets());
  ASSERT_EQ(offsets.back(), static_cast<std::int32_t>(sources.size()));
  for (int e = 0; e < plan.placement().num_experts(); ++e) {
    ASSERT_EQ(offsets[at(e + 1)] - offsets[at(e)], plan.counts(plan.rank())[at(e)]);
    for (auto i = offsets[at(e)]; i < offsets[at(e + 1)]; ++i) {
      ASSERT_EQ(ids.span<std::int32_t>()[at(sources[at(i)])], e);
      if (i > offsets[at(e)]) {
        ASSERT_LT(sources[at(i - 1)], sources[at(i)]);
      }
    }
  }
}

void check_forward(Dispatcher& dispatcher, const Plan& plan, Case& c,
                   const ReferencePlan& reference) {
  const auto r = at(plan.rank());
  Tensor rows({plan.num_rows(), c.hidden}, c.dtype);
  Tensor row_weights({plan.num_rows()}, Dtype::f32);
  poison(rows);
  poison(row_weights);
  dispatcher.dispatch(plan, {.x = c.x[r], .weights = c.weights[r]},
                      {.rows = rows, .row_weights = row_weights});
  ASSERT_TRUE(same_bits(rows, testing::reference_scatter(reference, plan.rank(), c.x, nullptr)));
  ASSERT_TRUE(same_bits(row_weights,
                        testing::reference_scatter_scalars(reference, plan.rank(), c.weights)));

  const auto expert_rows = c.rows_for(reference);
  const Tensor y = dispatcher.combine(plan, expert_rows[r], c.weights[r]);
  ASSERT_TRUE(same_bits(y, testing::reference_gather(reference, plan.rank(), expert_rows,
                                                     &c.weights, c.dtype, c.hidden)));
}

void check_backward(Dispatcher& dispatcher, const Plan& plan, Case& c,
                    const ReferencePlan& reference) {
  const auto r = at(plan.rank());
  const auto expert_rows = c.rows_for(reference);
  Tensor d_rows({plan.num_rows(), c.hidden}, c.dtype);
  Tensor d_weights({plan.num_tokens(), c.top_k}, Dtype::f32);
  poison(d_rows);
  poison(d_weights);
  dispatcher.combine_backward(plan,
                              {.d_y = c.d_y[r], .weights = c.weights[r], .rows = expert_rows[r]},
                              {.d_rows = d_rows, .d_weights = d_weights});
  ASSERT_TRUE(
      same_bits(d_rows, testing::reference_scatter(reference, plan.rank(), c.d_y, &c.weights)));
  ASSERT_TRUE(
      within(d_weights, testing::reference_dots(reference, plan.rank(), c.d_y, expert_rows), 1e-5));

  const auto d_rows_in = c.rows_for(reference);
  std::vector<Tensor> d_row_weights;
  for (const auto& buffer : reference.rows) {
    d_row_weights.push_back(
        c.random.tensor({static_cast<std::int64_t>(buffer.size())}, Dtype::f32));
  }
  Tensor d_x({plan.num_tokens(), c.hidden}, c.dtype);
  poison(d_x);
  poison(d_weights);
  dispatcher.dispatch_backward(plan, {.d_rows = d_rows_in[r], .d_row_weights = d_row_weights[r]},
                               {.d_x = d_x, .d_weights = d_weights});
  ASSERT_TRUE(same_bits(d_x, testing::reference_gather(reference, plan.rank(), d_rows_in, nullptr,
                                                       c.dtype, c.hidden)));
  ASSERT_TRUE(same_bits(d_weights,
                        testing::reference_gather_scalars(reference, plan.rank(), d_row_weights)));
}

class MovementProperty : public ::testing::TestWithParam<RankCase> {};

TEST_P(MovementProperty, EqualsTheReference) {
  const char* chosen = std::getenv("SWITCHYARD_TEST_SEED");
  const std::uint64_t first = chosen != nullptr ? std::strtoull(chosen, nullptr, 10) : 1;
  const int cases = chosen != nullptr ? 1 : kCases;
  std::cout << "seeds " << first << " to " << first + static_cast<std::uint64_t>(cases) - 1
            << "; SWITCHYARD_TEST_SEED=N repeats one\n";
  testing::on_ranks(GetParam(), [&](Communicator& comm) {
    for (int i = 0; i < cases; ++i) {
      const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
      SCOPED_TRACE("SWITCHYARD_TEST_SEED=" + std::to_string(seed));
      for (const MoverKind mover : testing::movers_of(comm)) {
        Case c(seed, comm.size());
        const ReferencePlan reference(c.placement, c.ids, c.alignment);
        DispatcherOptions options{.mover = mover};
        options.plan = {.hidden = c.hidden, .dtype = c.dtype, .alignment = c.alignment};
        Dispatcher dispatcher(comm, c.placement, options);
        const Plan plan = dispatcher.plan(c.ids[at(comm.rank())]);
        check_plan(plan, c.ids[at(comm.rank())], reference);
        check_forward(dispatcher, plan, c, reference);
        check_backward(dispatcher, plan, c, reference);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MovementProperty, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::movement_property_test
