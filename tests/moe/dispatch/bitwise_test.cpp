// SPDX-License-Identifier: Apache-2.0
// The promise: however the sequence is cut over ranks, and however rows travel, the bits are those
// of one rank. The tests themselves switch on mutations that break it, and must then fail.
#include <gtest/gtest.h>

#include <map>

#include "support/compare.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/reference/cut.h"
#include "switchyard/dispatcher.h"

namespace switchyard::bitwise_test {
namespace {

using testing::awkward_piece;
using testing::copy_of;
using testing::movers_of;
using testing::on_all;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr int kExperts = 6;
constexpr std::int64_t kTopK = 3;  // with two, swapped terms would give the same sum

enum class Mutation { none, reversed_ranks, swapped_k };

// The global sequence.
struct Problem {
  explicit Problem(std::int64_t hidden_size, Dtype row_dtype)
      : hidden(hidden_size), dtype(row_dtype) {
    Random random(11);
    ids = random.expert_ids({num_tokens, kTopK, kExperts, 0.4});
    x = random.tensor({num_tokens, hidden}, dtype);
    d_y = random.tensor({num_tokens, hidden}, dtype);
    weights = random.tensor({num_tokens, kTopK}, Dtype::f32);
  }

  std::int64_t num_tokens = 900;  // groups of several hundred rows
  std::int64_t hidden;
  Dtype dtype;
  Tensor ids, x, d_y, weights;
};

// Everything a step computes, in the order of the global sequence and of the experts.
struct Results {
  Tensor y, d_x, d_weights;
  std::map<int, Tensor> expert_rows;  // rows of each local expert, in slot order
  std::map<int, Tensor>
      expert_gradients;  // a sum over those rows in order, as a weight gradient is
};

std::vector<float> floats_of(const Tensor& rows) {
  std::vector<float> result;
  if (rows.dtype() == Dtype::f32) {
    const auto values = rows.span<float>();
    result.assign(values.begin(), values.end());
  } else {
    for (const Bfloat16 value : rows.span<Bfloat16>()) result.push_back(to_float(value));
  }
  return result;
}

void scale_row(const TensorView& row, float factor) {
  if (row.dtype() == Dtype::f32) {
    for (float& v : row.span<float>()) v *= factor;
  } else {
    for (Bfloat16& v : row.span<Bfloat16>()) v = to_bfloat16(to_float(v) * factor);
  }
}

Tensor swap_k(const Tensor& table) {
  Tensor result = table.clone();
  const auto n = static_cast<std::size_t>(table.rows() * kTopK);
  for (std::size_t i = 0; i < n; i += kTopK) {
    std::byte* row = result.data() + i * 4;
    for (std::size_t b = 0; b < 4; ++b) std::swap(row[b], row[(kTopK - 1) * 4 + b]);
  }
  return result;
}

Results run_step(Communicator& comm, const Problem& problem, const DispatcherOptions& options,
                 Mutation mutation) {
  // Reversed, rank r gets the tokens that rank r had, but calls itself another rank.
  const auto reversed = comm.split(0, -comm.rank());
  Communicator& ranks = mutation == Mutation::reversed_ranks ? *reversed : comm;
  const auto piece = awkward_piece(comm, problem.num_tokens);
  const auto mine = [&](const Tensor& whole) { return copy_of(piece.of(whole)); };
  const bool swapped = mutation == Mutation::swapped_k;
  const Tensor ids = swapped ? swap_k(mine(problem.ids)) : mine(problem.ids);
  const Tensor weights = swapped ? swap_k(mine(problem.weights)) : mine(problem.weights);
  const Tensor d_y = mine(problem.d_y);

  Dispatcher dispatcher(ranks, ExpertPlacement::contiguous(kExperts, comm.size()), options);
  const Plan plan = dispatcher.plan(ids);
  Results results;
  Tensor rows = dispatcher.dispatch(plan, mine(problem.x));
  Tensor outputs = rows.clone();
  const auto experts = plan.placement().experts_of(ranks.rank());
  const auto offsets = plan.row_offsets().span<std::int32_t>();
  const auto group_rows = plan.group_rows().span<std::int32_t>();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    for (std::int64_t r = offsets[i]; r < offsets[i] + group_rows[i]; ++r) {
      scale_row(outputs.view().slice(r, r + 1), 0.9F + 0.1F * static_cast<float>(experts[i]));
    }
  }
  results.y = dispatcher.combine(plan, outputs, weights);

  Tensor d_rows({plan.row_capacity(), problem.hidden}, problem.dtype);
  results.d_weights = Tensor({plan.num_tokens(), kTopK}, Dtype::f32);
  dispatcher.combine_backward(plan, {.d_y = d_y, .weights = weights, .rows = outputs},
                              {.d_rows = d_rows, .d_weights = results.d_weights});
  results.d_x = Tensor({plan.num_tokens(), problem.hidden}, problem.dtype);
  dispatcher.dispatch_backward(plan, {.d_rows = d_rows}, {.d_x = results.d_x});
  if (swapped) results.d_weights = swap_k(results.d_weights);

  const auto row_values = floats_of(rows);
  const auto d_row_values = floats_of(d_rows);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::int64_t begin = offsets[i];
    const std::int64_t end = begin + group_rows[i];
    results.expert_rows[experts[i]] = copy_of(rows.view().slice(begin, end));
    Tensor gradient = Tensor::zeros({problem.hidden}, Dtype::f32);
    const auto sums = gradient.span<float>();
    const auto hidden = static_cast<std::size_t>(problem.hidden);
    for (auto r = static_cast<std::size_t>(begin); r < static_cast<std::size_t>(end); ++r) {
      for (std::size_t h = 0; h < hidden; ++h) {
        sums[h] += row_values[r * hidden + h] * d_row_values[r * hidden + h];
      }
    }
    results.expert_gradients[experts[i]] = std::move(gradient);
  }
  return results;
}

DispatcherOptions options_for(const Problem& problem, MoverKind mover) {
  return {.plan = {.hidden = problem.hidden, .dtype = problem.dtype}, .mover = mover};
}

Results run_alone(const Problem& problem) {
  const auto alone = connect();
  return run_step(*alone, problem, options_for(problem, MoverKind::direct), Mutation::none);
}

// Whether the ranks' results together have the bits of one rank's.
bool same_as_alone(Communicator& comm, const Problem& problem, const Results& one,
                   const DispatcherOptions& options, Mutation mutation = Mutation::none) {
  const Results many = run_step(comm, problem, options, mutation);
  const auto piece = awkward_piece(comm, problem.num_tokens);
  bool equal = same_bits(many.y, piece.of(one.y)) && same_bits(many.d_x, piece.of(one.d_x)) &&
               same_bits(many.d_weights, piece.of(one.d_weights));
  for (const auto& [expert, rows] : many.expert_rows) {
    equal = equal && same_bits(rows, one.expert_rows.at(expert));
    equal = equal && same_bits(many.expert_gradients.at(expert), one.expert_gradients.at(expert));
  }
  return on_all(comm, equal);  // a mutation may show on some of them only
}

class BitwiseTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(BitwiseTest, AnyNumberOfRanksEqualsOne) {
  for (const std::int64_t hidden : {40, 2048}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Problem problem(hidden, dtype);
      const Results one = run_alone(problem);
      on_ranks(GetParam(), [&](Communicator& comm) {
        for (const MoverKind mover : movers_of(comm)) {
          EXPECT_TRUE(same_as_alone(comm, problem, one, options_for(problem, mover)));
        }
      });
    }
  }
}

TEST_P(BitwiseTest, AlignmentAndBoundsChangeNothing) {
  const Problem problem(40, Dtype::f32);
  const Results one = run_alone(problem);
  on_ranks(GetParam(), [&](Communicator& comm) {
    for (const MoverKind mover : movers_of(comm)) {
      auto options = options_for(problem, mover);
      options.plan.alignment = 128;
      EXPECT_TRUE(same_as_alone(comm, problem, one, options));
      options.plan.sizing = Sizing::bounded(128 * 40);
      EXPECT_TRUE(same_as_alone(comm, problem, one, options));
    }
  });
}

// Shows that the tests above can fail.
TEST_P(BitwiseTest, MutationsAreNoticed) {
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Problem problem(dtype == Dtype::f32 ? 40 : 96, dtype);
    const Results one = run_alone(problem);
    on_ranks(GetParam(), [&](Communicator& comm) {
      for (const MoverKind mover : movers_of(comm)) {
        auto options = options_for(problem, mover);
        for (const std::int64_t alignment : {1, 128}) {
          options.plan.alignment = alignment;
          EXPECT_FALSE(same_as_alone(comm, problem, one, options, Mutation::swapped_k));
          if (comm.size() > 1) {
            EXPECT_FALSE(same_as_alone(comm, problem, one, options, Mutation::reversed_ranks));
          }
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, BitwiseTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::bitwise_test
