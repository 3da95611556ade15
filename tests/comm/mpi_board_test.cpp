// SPDX-License-Identifier: Apache-2.0
// Whom a rank names at the deadline, by the page that the ranks of a host share.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "comm/mpi/board.h"

namespace switchyard::mpi {
namespace {

TEST(MpiBoard, NamesRanksThatAreMissingAndNotThoseThatWaitInAnEarlierCall) {
  const std::vector<Hello> hellos(2, make_hello());
  Board board(0, hellos);
  Board peer(1, hellos);
  const std::array<std::int64_t, 2> created = {board.create(), peer.create()};
  board.open(created);
  peer.open(created);
  ASSERT_TRUE(board.is_open() && peer.is_open());

  const auto enter = [](Board& to, std::uint64_t phase) { to.enter(phase, "barrier", 0); };
  enter(board, 1);
  EXPECT_EQ(board.find_missing(1), std::vector{1});
  enter(peer, 1);
  EXPECT_EQ(board.find_missing(1), std::vector<int>{});
  board.complete(1);
  enter(board, 2);
  peer.beat();
  EXPECT_EQ(board.find_missing(2), std::vector<int>{}) << "the peer waits in the first call";
  peer.complete(1);
  EXPECT_EQ(board.find_missing(2), std::vector{1}) << "the peer has left the first call";
}

}  // namespace
}  // namespace switchyard::mpi
