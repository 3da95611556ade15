// SPDX-License-Identifier: Apache-2.0
// Room for the tokens that a rank receives through peer memory, besides that for their rows.
#include <gtest/gtest.h>

#include <algorithm>

#include "support/compare.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::token_capacity_test {
namespace {

using testing::error_of;
using testing::gradients_for;
using testing::same_bits;
using testing::tiny_layer_options;
using testing::tiny_layer_weights;

constexpr std::int64_t kRows = 100;  // more than are needed
constexpr int kRanks = 3;

MoeLayerOptions options_with(const Sizing& sizing) {
  auto options = tiny_layer_options();
  options.mover = MoverKind::peer;
  options.sizing = sizing;
  return options;
}

// One rank's layer, and a batch of which rank 1, which has experts 2 and 3, receives 12 tokens with
// 18 rows; rank 0 receives 6, and rank 2 none.
struct Rank {
  Rank(Communicator& comm, const Sizing& sizing)
      : placement(ExpertPlacement::contiguous(6, kRanks)),
        layer(comm, placement, options_with(sizing)),
        weights(tiny_layer_weights(options_with(sizing), placement, comm.rank())),
        x(testing::Random(static_cast<std::uint64_t>(comm.rank())).tensor({4, 6}, Dtype::f32)) {}

  Tensor forward() { return layer.forward(weights, {.x = x, .expert_ids = ids}); }
  // y and d_x.
  std::pair<Tensor, Tensor> step() {
    SavedForBackward saved;
    Tensor y = layer.forward(weights, {.x = x, .expert_ids = ids}, saved);
    Tensor d_x(x.shape(), Dtype::f32);
    layer.backward(weights, saved, x, {.d_x = d_x, .gradients = gradients_for(weights)});
    return {std::move(y), std::move(d_x)};
  }

  ExpertPlacement placement;
  MoeLayer layer;
  MoeWeights weights;
  Tensor x;
  Tensor ids = Tensor::from<std::int32_t>({4, 2}, {2, 3, 3, 2, 2, 0, 3, 1});
};

TEST(TokenCapacity, ThatIsTooSmallIsAnErrorWithItsNumbers) {
  run_ranks(kRanks, [](Communicator& comm) {
    const Tensor exact = Rank(comm, Sizing::exact()).forward();
    for (const std::int64_t room : {1, 6, 11, 12}) {
      Rank rank(comm, Sizing::bounded(kRows, Overflow::fail, room));
      const Tensor y = rank.forward();
      const PlanStatus status = rank.layer.plan_status();
      EXPECT_EQ(status.overflow, room < 12);
      EXPECT_EQ(status.needed_rows, (std::vector<std::int64_t>{6, 18, 0}));
      EXPECT_EQ(status.needed_tokens, (std::vector<std::int64_t>{6, 12, 0}));
      EXPECT_EQ(status.available_rows, kRows);
      EXPECT_EQ(status.available_tokens, room);
      EXPECT_EQ(status.dropped,
                (std::vector<std::int64_t>{room < 6 ? 6 : 0, room < 12 ? 18 : 0, 0}));
      EXPECT_EQ(same_bits(y, exact), room == 12);
      EXPECT_EQ(error_of<InvalidArgument>([&] { rank.layer.check(); }),
                room == 12
                    ? "no error"
                    : "overflow: rank 1 receives 12 tokens, but has room for " +
                          std::to_string(room) +
                          "; give the plan a token capacity of at least 12, or exact sizing");
    }
  });
}

// The rows come first: with room for them all, tokens have as much unless the caller says less.
TEST(TokenCapacity, DefaultsToTheRowCapacity) {
  run_ranks(kRanks, [](Communicator& comm) {
    Rank rank(comm, Sizing::bounded(10));
    (void)rank.forward();
    EXPECT_EQ(rank.layer.plan_status().available_tokens, 10);
    EXPECT_EQ(error_of<InvalidArgument>([&] { rank.layer.check(); }),
              "overflow: rank 1 needs 18 rows, but the capacity is 10 on every rank; give the plan "
              "a capacity of at least 18, or exact sizing");
  });
}

// Rows then go straight to their slots, and tokens need no room.
TEST(TokenCapacity, IsNotUsedWhereRowsAreDropped) {
  run_ranks(kRanks, [](Communicator& comm) {
    for (const std::int64_t rows : {std::int64_t{10}, kRows}) {
      Rank plenty(comm, Sizing::bounded(rows, Overflow::drop));
      Rank little(comm, Sizing::bounded(rows, Overflow::drop, 1));
      const auto expected = plenty.step();
      const auto actual = little.step();
      EXPECT_TRUE(same_bits(actual.first, expected.first));
      EXPECT_TRUE(same_bits(actual.second, expected.second));
      const PlanStatus status = little.layer.plan_status();
      EXPECT_EQ(status.overflow, rows == 10);
      EXPECT_EQ(status.dropped, (std::vector<std::int64_t>{0, rows == 10 ? 8 : 0, 0}));
      EXPECT_EQ(status.available_tokens, 0);
      EXPECT_EQ(std::ranges::max(status.needed_tokens), 0);
      little.layer.check();
    }
  });
}

TEST(TokenCapacity, GrowsWhenAStepIsRunAgain) {
  run_ranks(kRanks, [](Communicator& comm) {
    Rank exact(comm, Sizing::exact());
    const auto expected = exact.step();
    // Grows to an eighth more than needed; without a bound of its own, to the row capacity.
    for (const auto& [sizing, rows, tokens] :
         {std::tuple(Sizing::bounded(kRows, Overflow::fail, 5), kRows, std::int64_t{13}),
          std::tuple(Sizing::bounded(8, Overflow::fail, 12), std::int64_t{20}, std::int64_t{13}),
          std::tuple(Sizing::bounded(8), std::int64_t{20}, std::int64_t{20})}) {
      Rank rank(comm, sizing);
      const std::vector<MoeLayer*> all{&rank.layer};
      std::pair<Tensor, Tensor> results;
      int runs = 0;
      const auto step = [&] {
        ++runs;
        results = rank.step();
      };
      EXPECT_TRUE(run_step(all, step));
      EXPECT_EQ(runs, 2);
      EXPECT_TRUE(same_bits(results.first, expected.first));
      EXPECT_TRUE(same_bits(results.second, expected.second));
      EXPECT_EQ(rank.layer.options().sizing.capacity(), rows);
      EXPECT_EQ(rank.layer.options().sizing.token_capacity(), tokens);
      EXPECT_FALSE(run_step(all, step));
      EXPECT_EQ(runs, 3);
      EXPECT_TRUE(same_bits(results.second, expected.second));
      rank.layer.check();
    }
    Rank dropping(comm, Sizing::bounded(8, Overflow::drop, 1));
    const std::vector<MoeLayer*> all{&dropping.layer};
    EXPECT_FALSE(run_step(all, [&] { (void)dropping.step(); }));
  });
}

TEST(TokenCapacity, MustNotBeNegativeNorDiffer) {
  run_ranks(kRanks, [](Communicator& comm) {
    const auto error_with = [&](std::int64_t room) {
      return error_of<InvalidArgument>(
          [&] { Rank(comm, Sizing::bounded(kRows, Overflow::fail, room)); });
    };
    EXPECT_EQ(error_with(-1), "rank 0: token_capacity (-1) must not be negative");
    EXPECT_EQ(error_with(comm.rank() == 2 ? 5 : 6),
              "ranks disagree about token_capacity: rank 0 has 6, rank 2 has 5");
    EXPECT_EQ(error_with(6), "no error");
    // Groups of one batch grow together, so they must start alike, too.
    const auto alone = comm.split(comm.rank(), 0);
    auto options = options_with(Sizing::bounded(kRows, Overflow::fail, comm.rank() == 2 ? 5 : 6));
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                MoeLayer({.experts = *alone, .batch = &comm}, ExpertPlacement::contiguous(6, 1),
                         options);
              }),
              "ranks disagree about token_capacity: rank 0 has 6, rank 2 has 5");
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(6, kRanks),
                          {.plan = {.hidden = 6}, .mover = MoverKind::peer});
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { dispatcher.resize(Sizing::bounded(kRows, Overflow::fail, -2)); }),
              "token_capacity (-2) must not be negative");
  });
}

}  // namespace
}  // namespace switchyard::token_capacity_test
