// SPDX-License-Identifier: Apache-2.0
// Attention against double precision and central differences, over one rank and over sp.
#include "model/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "support/compare.h"
#include "support/finite_difference.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/reference/attention_reference.h"
#include "support/reference/moe_reference.h"
#include "switchyard/run_ranks.h"

namespace switchyard::train::attention_test {
namespace {

using testing::AttentionSizes;
using testing::Doubles;
using testing::doubles_of;
using testing::near;
using testing::Random;
using testing::RankCase;
using testing::same_bits;
using testing::tensor_of;

constexpr double kTolerance = 1e-5;  // f32 sums of some hundred terms, in exponents too

// The shard's rows of [batch · length, H].
Tensor piece_of(const Tensor& full, const SequenceShard& shard) {
  Tensor piece({shard.num_tokens(), full.shape()[1]}, full.dtype());
  for (std::int64_t t = 0; t < piece.rows(); ++t) {
    const auto from = t / shard.count() * shard.length() + shard.offset() + t % shard.count();
    std::memcpy(piece.view().row(t), full.view().row(from),
                static_cast<std::size_t>(piece.view().row_bytes()));
  }
  return piece;
}

struct Result {
  Tensor y, d_x;        // of this rank's tokens
  Tensor d_qkv, d_out;  // summed over sp
};

// The whole problem, the same on every rank.
struct Problem {
  explicit Problem(const AttentionSizes& the_sizes)
      : sizes(the_sizes),
        x(rows(1)),
        residual(rows(2)),
        d_y(rows(3)),
        qkv(Random(4).tensor({3 * sizes.hidden, sizes.hidden}, Dtype::f32)),
        out(Random(5).tensor({sizes.hidden, sizes.hidden}, Dtype::f32)) {}

  Tensor rows(std::uint64_t seed) const {
    return Random(seed).tensor({sizes.batch * sizes.length, sizes.hidden}, Dtype::f32);
  }

  Result run(Communicator& sp, int threads) const {
    const SequenceShard shard(sizes.batch, sizes.length, sp.size(), sp.rank());
    const Attention attention({sizes.hidden, sizes.heads, static_cast<float>(sizes.rotary_base)},
                              sp);
    Compute compute(Device::cpu({.num_threads = threads}));
    const Tensor own_x = piece_of(x, shard);
    Result result{piece_of(residual, shard), piece_of(residual, shard), qkv.clone(), out.clone()};
    AttentionSaved saved;
    // Results must not depend on what an earlier step left behind.
    Tensor ignored = own_x.clone();
    attention.forward(compute, {qkv, out}, shard, piece_of(d_y, shard), ignored, saved);
    attention.forward(compute, {qkv, out}, shard, own_x, result.y, saved);
    const AttentionGradients gradients{result.d_qkv, result.d_out};
    attention.backward(compute, {qkv, out}, shard, saved,
                       {own_x, piece_of(d_y, shard), result.d_x, gradients});
    sp.all_reduce(result.d_qkv);
    sp.all_reduce(result.d_out);
    return result;
  }
  Result run_alone(int threads = 1) const {
    Result result;
    run_ranks(1, [&](Communicator& sp) { result = run(sp, threads); });
    return result;
  }

  AttentionSizes sizes;
  Tensor x, residual, d_y, qkv, out;
};

// The same in double precision, whole.
Result expected(const Problem& problem) {
  Doubles x = doubles_of(problem.x);
  Doubles qkv = doubles_of(problem.qkv);
  Doubles out = doubles_of(problem.out);
  const auto d_y = doubles_of(problem.d_y);
  Doubles y = testing::reference_attention(problem.sizes, x, qkv, out);
  const testing::Loss loss = [&] {
    return testing::dot(testing::reference_attention(problem.sizes, x, qkv, out), d_y);
  };
  const auto residual = doubles_of(problem.residual);
  for (std::size_t i = 0; i < y.values.size(); ++i) y.values[i] += residual.values[i];
  return {tensor_of(y), tensor_of(testing::numeric_gradient(x, loss)),
          tensor_of(testing::numeric_gradient(qkv, loss)),
          tensor_of(testing::numeric_gradient(out, loss))};
}

class AttentionTest : public ::testing::TestWithParam<RankCase> {};

// Uneven pieces, empty ones, one token, and blocks that pieces do not begin with.
TEST_P(AttentionTest, EqualsReferenceAndItsDifferences) {
  for (const AttentionSizes sizes : {AttentionSizes{2, 10, 8, 2}, AttentionSizes{1, 3, 4, 1},
                                     AttentionSizes{3, 1, 4, 2}, AttentionSizes{1, 130, 4, 2}}) {
    const Problem problem(sizes);
    const Result exact = expected(problem);
    testing::on_ranks(GetParam(), [&](Communicator& sp) {
      const SequenceShard shard(sizes.batch, sizes.length, sp.size(), sp.rank());
      const Result result = problem.run(sp, 1);
      EXPECT_TRUE(near(result.y, piece_of(exact.y, shard), kTolerance));
      EXPECT_TRUE(near(result.d_x, piece_of(exact.d_x, shard), kTolerance));
      EXPECT_TRUE(near(result.d_qkv, exact.d_qkv, kTolerance));
      EXPECT_TRUE(near(result.d_out, exact.d_out, kTolerance));
    });
  }
}

TEST_P(AttentionTest, NoTokensGiveZeroGradients) {
  for (const AttentionSizes sizes : {AttentionSizes{0, 4, 8, 2}, AttentionSizes{2, 0, 8, 2}}) {
    const Problem problem(sizes);
    testing::on_ranks(GetParam(), [&](Communicator& sp) {
      const Result result = problem.run(sp, 1);
      EXPECT_TRUE(same_bits(result.d_qkv, Tensor::zeros({24, 8}, Dtype::f32)));
      EXPECT_TRUE(same_bits(result.d_out, Tensor::zeros({8, 8}, Dtype::f32)));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AttentionTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(Attention, BitsDoNotDependOnThreads) {
  const Problem problem({3, 150, 32, 4});
  const Result one = problem.run_alone(1);
  const Result three = problem.run_alone(3);
  EXPECT_TRUE(same_bits(three.y, one.y));
  EXPECT_TRUE(same_bits(three.d_x, one.d_x));
  EXPECT_TRUE(same_bits(three.d_qkv, one.d_qkv));
  EXPECT_TRUE(same_bits(three.d_out, one.d_out));
}

TEST(Attention, IsExactlyCausal) {
  Problem problem({1, 100, 8, 2});
  const Result before = problem.run_alone();
  constexpr std::int64_t kChanged = 70;
  problem.x.span<float>()[kChanged * 8] += 1.0F;
  const Result after = problem.run_alone();
  EXPECT_TRUE(same_bits(after.y.view().slice(0, kChanged), before.y.view().slice(0, kChanged)));
  for (std::int64_t t = kChanged; t < 100; ++t) {
    EXPECT_FALSE(same_bits(after.y.view().slice(t, t + 1), before.y.view().slice(t, t + 1)));
  }
}

// Longer than what is computed at once: gradients along directions, since there are many values.
TEST(Attention, CutsLongSequences) {
  Problem problem({1, 700, 4, 2});
  const Result result = problem.run_alone();
  Doubles x = doubles_of(problem.x);
  const auto qkv = doubles_of(problem.qkv);
  const auto out = doubles_of(problem.out);
  const auto d_y = doubles_of(problem.d_y);
  Tensor mixed = tensor_of(testing::reference_attention(problem.sizes, x, qkv, out));
  for (std::size_t i = 0; i < mixed.span<float>().size(); ++i) {
    mixed.span<float>()[i] += problem.residual.span<float>()[i];
  }
  EXPECT_TRUE(near(result.y, mixed, kTolerance));
  for (const std::uint64_t seed : {11, 12, 13}) {
    const Doubles direction = doubles_of(problem.rows(seed));
    Doubles along{{1}, {0.0}};
    const auto slope = testing::numeric_gradient(along, [&] {
      Doubles moved = x;
      for (std::size_t i = 0; i < x.values.size(); ++i) {
        moved.values[i] += along.values[0] * direction.values[i];
      }
      return testing::dot(testing::reference_attention(problem.sizes, moved, qkv, out), d_y);
    });
    EXPECT_NEAR(testing::dot(doubles_of(result.d_x), direction), slope.values[0],
                1e-4 * std::abs(slope.values[0]));
  }
}

}  // namespace
}  // namespace switchyard::train::attention_test
