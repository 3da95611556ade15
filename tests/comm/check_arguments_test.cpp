#include "comm/check_arguments.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "support/errors.h"
#include "support/ranks.h"

namespace switchyard::testing::check_arguments_test {
namespace {

class CheckTogetherTest : public ::testing::TestWithParam<RankCase> {
 protected:
  // What every rank says when the last one throws this.
  template <typename Thrown>
  static void expect_error(const Thrown& thrown, const std::string& expected) {
    on_ranks(GetParam(), [&](Communicator& comm) {
      const int last = comm.size() - 1;
      EXPECT_EQ(error_of<InvalidArgument>([&] {
                  check_together("op", comm, [&] {
                    if (comm.rank() == last) throw thrown;
                  });
                }),
                "op: rank " + std::to_string(last) + ": " + expected);
      comm.barrier();  // it stays usable
    });
  }
};

TEST_P(CheckTogetherTest, NoRankWaitsForOneThatFails) {
  expect_error(InvalidArgument("bad"), "bad");
  expect_error(Unsupported("not here"), "not here");
  expect_error(std::runtime_error("odd"), "odd");
}

TEST_P(CheckTogetherTest, AnErrorNeedNotHaveWords) {
  expect_error(std::runtime_error(""), "an error that does not say what it is");
}

TEST_P(CheckTogetherTest, WhatACommunicatorThrowsPasses) {
  on_ranks(GetParam(), [](Communicator& comm) {
    EXPECT_EQ(error_of<CommunicationError>(
                  [&] { check_together("op", comm, [] { throw CommunicationError("gone"); }); }),
              "gone");
  });
}

TEST_P(CheckTogetherTest, OnlyTheNamedErrorsAreARanksOwn) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto throwing = [] { throw InvalidArgument("shared"); };
    EXPECT_EQ(error_of<InvalidArgument>([&] { or_abort<DeviceError>({&comm}, "op", throwing); }),
              "shared");
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CheckTogetherTest, ::testing::ValuesIn(rank_cases()),
                         rank_case_name);

// Who waits for nobody may try again; who has peers tells them. On threads alone: a process that
// has aborted a communicator leaves MPI without finalising it.
TEST(OrAbortTest, ARankThatIsAloneKeepsItsCommunicator) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks({"threads", ranks}, [&](Communicator& comm) {
      EXPECT_EQ(error_of<std::runtime_error>(
                    [&] { or_abort({&comm}, "op", [] { throw std::runtime_error("odd"); }); }),
                "odd");
      const auto next = error_of<CommunicationError>([&] { comm.barrier(); });
      EXPECT_EQ(next == "no error", ranks == 1) << next;
    });
  }
}

}  // namespace
}  // namespace switchyard::testing::check_arguments_test
