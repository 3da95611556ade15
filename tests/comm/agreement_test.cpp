// SPDX-License-Identifier: Apache-2.0
#include "comm/agreement.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/sequence.h"

namespace switchyard::testing::agreement_test {
namespace {

class AgreeTest : public ::testing::TestWithParam<RankCase> {
 protected:
  // Expects this error on every rank when the last one throws.
  template <typename Expected, typename Thrown>
  static void expect_error(const Thrown& thrown, const std::string& expected) {
    on_ranks(GetParam(), [&](Communicator& comm) {
      const int last = comm.size() - 1;
      const auto work = [&] {
        if (comm.rank() == last) throw thrown;
      };
      EXPECT_EQ(error_of<Expected>([&] { agree(comm, "op", work); }),
                "op: rank " + std::to_string(last) + ": " + expected);
      EXPECT_EQ(error_of<Expected>([&] { agree(comm, work); }), expected);
      comm.barrier();  // it stays usable
    });
  }
};

TEST_P(AgreeTest, NothingIsThrownWhereAllSucceed) {
  on_ranks(GetParam(), [](Communicator& comm) {
    int calls = 0;
    agree(comm, "op", [&] { ++calls; });
    EXPECT_EQ(calls, 1);
  });
}

TEST_P(AgreeTest, NoRankWaitsForOneThatFails) {
  expect_error<InvalidArgument>(InvalidArgument("bad"), "bad");
  expect_error<InvalidArgument>(std::runtime_error("odd"), "odd");
}

TEST_P(AgreeTest, TheKindOfAnErrorStays) {
  expect_error<StorageError>(StorageError("full"), "full");
  expect_error<Unsupported>(Unsupported("not here"), "not here");
}

TEST_P(AgreeTest, AnErrorNeedNotHaveWords) {
  expect_error<InvalidArgument>(std::runtime_error(""), "an error without a message");
  expect_error<InvalidArgument>(42, "an error without a message");  // an engine's own
}

TEST_P(AgreeTest, AllRanksThrowTheErrorOfTheLowestFailedRank) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const int first = comm.size() / 2;
    const auto words = [](int rank) {
      return std::to_string(rank) + std::string(static_cast<std::size_t>(400 * rank), '!');
    };
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                agree(comm, [&] {
                  if (comm.rank() >= first) throw std::runtime_error(words(comm.rank()));
                });
              }),
              words(first));
  });
}

TEST_P(AgreeTest, ErrorsOfTheCommunicatorPassThrough) {
  on_ranks(GetParam(), [](Communicator& comm) {
    EXPECT_EQ(error_of<CommunicationError>(
                  [&] { agree(comm, "op", [] { throw CommunicationError("gone"); }); }),
              "gone");
  });
}

TEST_P(AgreeTest, ValuesThatDifferAreNamed) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const int last = comm.size() - 1;
    require_equal(comm, "size", 3);
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { require_equal(comm, "size", comm.rank() == last ? -4 : 3); }),
              last == 0 ? "no error"
                        : "ranks disagree about size: rank 0 has 3, rank " + std::to_string(last) +
                              " has -4");
    comm.barrier();
  });
}

TEST_P(AgreeTest, OnlyTheNamedErrorsAreARanksOwn) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto throwing = [] { throw InvalidArgument("shared"); };
    EXPECT_EQ(error_of<InvalidArgument>([&] { or_abort<DeviceError>({&comm}, "op", throwing); }),
              "shared");
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, AgreeTest, ::testing::ValuesIn(rank_cases()), rank_case_name);

// Who waits for nobody may try again; who has peers tells them. On threads alone: a process that
// has aborted a communicator leaves MPI without finalising it.
void expect_usable_alone(const std::function<void(Communicator&)>& fails) {
  for (const int ranks : {1, 2, 3}) {
    on_ranks({"threads", ranks}, [&](Communicator& comm) {
      fails(comm);
      const auto next = error_of<CommunicationError>([&] { comm.barrier(); });
      EXPECT_EQ(next == "no error", ranks == 1) << next;
    });
  }
}

TEST(OrAbortTest, ARankThatIsAloneKeepsItsCommunicator) {
  expect_usable_alone([](Communicator& comm) {
    EXPECT_EQ(error_of<std::runtime_error>(
                  [&] { or_abort({&comm}, "op", [] { throw std::runtime_error("odd"); }); }),
              "odd");
  });
}

TEST(CheckArgumentsTest, ARankThatIsAloneGoesOnAfterAWrongShape) {
  expect_usable_alone([](Communicator& comm) {
    const SequenceShard shard(1, 6, comm.size(), comm.rank());
    const auto error = error_of<InvalidArgument>([&] {
      (void)gather_sequence(comm, shard, Tensor::zeros({9, 2}, Dtype::f32));
    });
    EXPECT_EQ(error.find("gather_sequence: local is [9,2], but the shard has "), 0U) << error;
  });
}

}  // namespace
}  // namespace switchyard::testing::agreement_test
