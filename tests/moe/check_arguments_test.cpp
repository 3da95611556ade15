#include "moe/check_arguments.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "support/errors.h"
#include "support/ranks.h"

namespace switchyard::testing {
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

// Who waits for nobody may try again; who has peers tells them.
TEST_P(CheckTogetherTest, ARankThatIsAloneKeepsItsCommunicator) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto group = comm.split(0, comm.rank());  // which this makes unusable, and not comm
    EXPECT_EQ(error_of<std::runtime_error>(
                  [&] { or_abort({group.get()}, "op", [] { throw std::runtime_error("odd"); }); }),
              "odd");
    const auto next = error_of<CommunicationError>([&] { group->barrier(); });
    EXPECT_EQ(next == "no error", comm.size() == 1) << next;
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

}  // namespace
}  // namespace switchyard::testing
