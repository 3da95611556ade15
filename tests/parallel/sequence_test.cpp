// SPDX-License-Identifier: Apache-2.0
#include "switchyard/sequence.h"

#include <gtest/gtest.h>

#include <limits>

#include "support/compare.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/random.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::sequence_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::on_ranks;
using testing::Random;
using testing::RankCase;
using testing::same_bits;

constexpr std::int64_t kHidden = 5;

struct Lengths {
  std::int64_t batch;
  std::int64_t length;
};
// Uneven, even, fewer tokens than ranks, one token, none, no sequence.
constexpr std::array<Lengths, 7> kLengths{
    {{1, 13}, {3, 13}, {2, 8}, {2, 3}, {4, 1}, {2, 0}, {0, 4}}};

TEST(SequenceShard, CutsUnevenly) {
  // 10 tokens over 4 ranks: pieces of 3, the last has 1.
  const std::array<std::int64_t, 4> counts{3, 3, 3, 1};
  for (int r = 0; r < 4; ++r) {
    const SequenceShard shard(2, 10, 4, r);
    EXPECT_EQ(shard.padded_length(), 3);
    EXPECT_EQ(shard.offset(), 3 * r);
    EXPECT_EQ(shard.count(), counts[static_cast<std::size_t>(r)]);
    EXPECT_EQ(shard.num_tokens(), 2 * shard.count());
  }
  // 5 over 4: pieces of 2, the third has 1, the last none.
  EXPECT_EQ(SequenceShard(1, 5, 4, 2).count(), 1);
  EXPECT_EQ(SequenceShard(1, 5, 4, 3).count(), 0);
  EXPECT_EQ(SequenceShard(1, 5, 4, 3).offset(), 5);
  EXPECT_EQ(SequenceShard(1, 0, 4, 3).count(), 0);
}

TEST(SequenceShard, CountsNoMoreThan64Bits) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  EXPECT_EQ(testing::error_of<InvalidArgument>([] { SequenceShard(kMany, kMany, 1, 0); }),
            "1099511627776 sequences of 1099511627776 tokens are too many tokens to count");
  const auto most = std::numeric_limits<std::int64_t>::max();
  const SequenceShard longest(1, most, 4, 3);
  EXPECT_EQ(longest.padded_length(), most / 4 + 1);
  EXPECT_EQ(longest.offset() + longest.count(), most);
  const SequenceShard last(1, most, 1'000'000'000, 999'999'999);
  EXPECT_EQ(last.offset() + last.count(), most);
}

TEST(SequenceShard, ChecksItsNumbers) {
  EXPECT_EQ(error_of<InvalidArgument>([] { SequenceShard(1, -2, 2, 0); }),
            "batch (1) and length (-2) must not be negative");
  EXPECT_EQ(error_of<InvalidArgument>([] { SequenceShard(1, 2, 0, 0); }),
            "sp_size (0) must be positive");
  EXPECT_EQ(error_of<InvalidArgument>([] { SequenceShard(1, 2, 2, 2); }),
            "sp_rank (2) must be a rank of 2");
}

// This rank's tokens of [batch, length, H], by the definition: one token at a time.
Tensor shard_of(const Tensor& full, const SequenceShard& shard) {
  Tensor local({shard.num_tokens(), full.shape()[2]}, full.dtype());
  const auto row_bytes = local.view().row_bytes();
  for (std::int64_t b = 0; b < shard.batch(); ++b) {
    for (std::int64_t i = 0; i < shard.count(); ++i) {
      const auto global = b * shard.length() + shard.offset() + i;
      std::copy_n(full.data() + global * row_bytes, row_bytes,
                  local.view().row(b * shard.count() + i));
    }
  }
  return local;
}

// Every num_parts-th element of a gradient, zeros elsewhere: the parts add up to it exactly.
Tensor part_of(const Tensor& whole, int num_parts, int part) {
  Tensor result = whole.clone();
  const auto values = result.span<float>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (static_cast<int>(i) % num_parts != part) values[i] = 0.0F;
  }
  return result;
}

class SequenceTest : public ::testing::TestWithParam<RankCase> {};

TEST_P(SequenceTest, GatherGivesTheWholeSequence) {
  on_ranks(GetParam(), [](Communicator& sp) {
    for (const auto& [batch, length] : kLengths) {
      const SequenceShard shard(batch, length, sp.size(), sp.rank());
      const Tensor full = Random(5).tensor({batch, length, kHidden}, Dtype::bf16);
      EXPECT_TRUE(same_bits(gather_sequence(sp, shard, shard_of(full, shard)), full));
    }
  });
}

// All ranks compute the same after the gather, so they all have the gradient of the whole.
TEST_P(SequenceTest, BackwardSliceTakesTheOwnPart) {
  on_ranks(GetParam(), [](Communicator& sp) {
    for (const auto& [batch, length] : kLengths) {
      const SequenceShard shard(batch, length, sp.size(), sp.rank());
      const Tensor d_full = Random(6).tensor({batch, length, kHidden}, Dtype::f32);
      EXPECT_TRUE(
          same_bits(gather_sequence_backward_slice(shard, d_full), shard_of(d_full, shard)));
    }
  });
}

// Each rank did something else: the gradient is the sum, added in rank order.
TEST_P(SequenceTest, BackwardSumAddsTheParts) {
  on_ranks(GetParam(), [](Communicator& sp) {
    for (const auto& [batch, length] : kLengths) {
      const SequenceShard shard(batch, length, sp.size(), sp.rank());
      Tensor total = Tensor::zeros({batch, length, kHidden}, Dtype::f32);
      Tensor mine;
      for (int r = 0; r < sp.size(); ++r) {
        Tensor part =
            Random(static_cast<std::uint64_t>(20 + r)).tensor({batch, length, kHidden}, Dtype::f32);
        for (std::size_t i = 0; i < part.span<float>().size(); ++i) {
          total.span<float>()[i] =
              r == 0 ? part.span<float>()[i] : total.span<float>()[i] + part.span<float>()[i];
        }
        if (r == sp.rank()) mine = std::move(part);
      }
      EXPECT_TRUE(same_bits(gather_sequence_backward_sum(sp, shard, mine), shard_of(total, shard)));
    }
  });
}

// combine_sequence over any number of ranks equals one rank's combine of all tokens; and a step
// back through it, in both forms, gives one rank's gradient.
TEST_P(SequenceTest, CombineSequenceEqualsOneRank) {
  on_ranks(GetParam(), [](Communicator& sp) {
    const auto alone = connect();
    for (const auto& [batch, length] : kLengths) {
      Random random(8);
      const Tensor ids = random.expert_ids({batch * length, 2, 4});
      const Tensor x = random.tensor({batch, length, kHidden}, Dtype::f32);
      const Tensor weights = random.tensor({batch, length, 2}, Dtype::f32);
      const Tensor d_y = random.tensor({batch, length, kHidden}, Dtype::f32);

      const auto step = [&](Communicator& comm, const SequenceShard& shard) {
        Dispatcher dispatcher(comm, ExpertPlacement::contiguous(4, comm.size()),
                              {.plan = {.hidden = kHidden}});
        const Tensor local_x = shard_of(x, shard);
        const Tensor local_weights = shard_of(weights, shard);
        Tensor ids3({batch, length, 2}, Dtype::i32);
        std::copy_n(ids.data(), ids.bytes(), ids3.data());
        const Plan plan = dispatcher.plan(shard_of(ids3, shard));
        Tensor rows = dispatcher.dispatch(plan, local_x);
        Tensor y = combine_sequence(dispatcher, plan, {.rows = rows, .weights = local_weights},
                                    comm, shard);
        const auto backward = [&](const Tensor& d_local) {
          Tensor d_x({shard.num_tokens(), kHidden}, Dtype::f32);
          dispatcher.combine_backward(plan, {.d_y = d_local, .weights = local_weights},
                                      {.d_rows = rows});
          dispatcher.dispatch_backward(plan, {.d_rows = rows}, {.d_x = d_x});
          return d_x;
        };
        Tensor replicated = backward(gather_sequence_backward_slice(shard, d_y));
        const Tensor part = part_of(d_y, comm.size(), comm.rank());
        Tensor partial = backward(gather_sequence_backward_sum(comm, shard, part));
        return std::tuple(std::move(y), std::move(replicated), std::move(partial));
      };
      const SequenceShard shard(batch, length, sp.size(), sp.rank());
      const auto [y, replicated, partial] = step(sp, shard);
      const auto [one_y, one_d_x, same_d_x] = step(*alone, SequenceShard(batch, length, 1, 0));
      EXPECT_TRUE(same_bits(y, one_y));
      Tensor one_d_x3({batch, length, kHidden}, Dtype::f32);
      std::copy_n(one_d_x.data(), one_d_x.bytes(), one_d_x3.data());
      EXPECT_TRUE(same_bits(replicated, shard_of(one_d_x3, shard)));
      EXPECT_TRUE(same_bits(partial, shard_of(one_d_x3, shard)));
    }
  });
}

// The two forms differ by the factor sp where the gradient is replicated: mixing them up shows.
TEST_P(SequenceTest, TheTwoFormsDiffer) {
  on_ranks(GetParam(), [](Communicator& sp) {
    const SequenceShard shard(1, 16, sp.size(), sp.rank());
    Tensor d_full({1, 16, 1}, Dtype::f32);
    for (float& v : d_full.span<float>()) v = 1.0F;
    const Tensor slice = gather_sequence_backward_slice(shard, d_full);
    const Tensor sum = gather_sequence_backward_sum(sp, shard, d_full);
    for (std::size_t i = 0; i < slice.span<float>().size(); ++i) {
      EXPECT_EQ(slice.span<float>()[i], 1.0F);
      EXPECT_EQ(sum.span<float>()[i], static_cast<float>(sp.size()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SequenceTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

TEST(SequenceErrors, NameTheValues) {
  const auto error_with = [](const std::function<void(Communicator&)>& call) {
    const auto world = connect();
    return error_of<InvalidArgument>([&] { call(*world); });
  };
  const SequenceShard shard(2, 3, 1, 0);
  EXPECT_EQ(error_with([&](Communicator& sp) {
              (void)gather_sequence(sp, shard, Tensor({5, 4}, Dtype::f32));
            }),
            "gather_sequence: local is [5,4], but the shard has 2 x 3 tokens");
  EXPECT_EQ(error_with([&](Communicator& sp) {
              (void)gather_sequence(sp, SequenceShard(2, 3, 2, 1), Tensor({2, 4}, Dtype::f32));
            }),
            "gather_sequence: the shard is rank 1 of 2, but the communicator is rank 0 of 1");
  EXPECT_EQ(error_with([&](Communicator&) {
              (void)gather_sequence_backward_slice(shard, Tensor({2, 4, 8}, Dtype::f32));
            }),
            "d_full is [2,4,8] (contiguous: true), but the sequence is [2,3,H]");
  EXPECT_EQ(error_with([&](Communicator& sp) {
              Dispatcher dispatcher(sp, ExpertPlacement::contiguous(1, 1), {.plan = {.hidden = 4}});
              const Plan plan = dispatcher.plan(Tensor::zeros({5, 1}, Dtype::i32));
              Tensor rows({5, 4}, Dtype::f32);
              (void)combine_sequence(dispatcher, plan, {.rows = rows}, sp, shard);
            }),
            "combine_sequence: the plan has 5 tokens, but the shard has 2 x 3");
}

TEST(SequenceErrors, AGpusMemoryIsNotRead) {
  const auto world = connect();
  const SequenceShard shard(2, 3, 1, 0);
  Tensor local({6, 4}, Dtype::f32);
  Tensor full({2, 3, 4}, Dtype::f32);
  const std::string rest = testing::kGivenToTheCpu;
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { (void)gather_sequence_backward_slice(shard, elsewhere(full)); }),
            "d_full [2,3,4]" + rest);
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { (void)gather_sequence_backward_sum(*connect(), shard, elsewhere(full)); }),
            "gather_sequence_backward_sum: d_full [2,3,4]" + rest);
  EXPECT_EQ(
      error_of<InvalidArgument>([&] { (void)gather_sequence(*world, shard, elsewhere(local)); }),
      "gather_sequence: local [6,4]" + rest);
}

}  // namespace
}  // namespace switchyard::sequence_test
