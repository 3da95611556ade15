// What one rank throws, all do.
#include "common/together.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/error.h"

namespace switchyard::train::together_test {
namespace {

using testing::error_of;

class TogetherTest : public ::testing::TestWithParam<testing::RankCase> {};

TEST_P(TogetherTest, NothingIsThrownWhereAllSucceed) {
  testing::on_ranks(GetParam(), [](Communicator& comm) {
    int calls = 0;
    together(comm, [&] { ++calls; });
    EXPECT_EQ(calls, 1);
  });
}

TEST_P(TogetherTest, TheLowestRankThatFailsIsHeardByAll) {
  testing::on_ranks(GetParam(), [](Communicator& comm) {
    const int first = comm.size() / 2;
    const auto name = [](int rank) {
      return "rank " + std::to_string(rank) + std::string(static_cast<std::size_t>(rank), '!');
    };
    EXPECT_EQ(error_of<InvalidArgument>([&] {
                together(comm, [&] {
                  if (comm.rank() >= first) throw std::runtime_error(name(comm.rank()));
                });
              }),
              name(first));
    comm.barrier();  // still usable
  });
}

TEST_P(TogetherTest, AStorageErrorStaysOne) {
  testing::on_ranks(GetParam(), [](Communicator& comm) {
    EXPECT_EQ(error_of<StorageError>([&] {
                together(comm, [&] {
                  if (comm.rank() == comm.size() - 1) throw StorageError("full");
                });
              }),
              "full");
  });
}

TEST_P(TogetherTest, AnErrorWithoutWordsIsOneToo) {
  testing::on_ranks(GetParam(), [](Communicator& comm) {
    EXPECT_THROW(together(comm, [&] { throw std::runtime_error(""); }), InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TogetherTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::train::together_test
