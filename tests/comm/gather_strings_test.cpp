// SPDX-License-Identifier: Apache-2.0
#include "comm/gather_strings.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "support/ranks.h"

namespace switchyard::gather_strings_test {
namespace {

class GatherStringsTest : public ::testing::TestWithParam<testing::RankCase> {
 protected:
  // Every rank learns what each said.
  static void expect_all(const std::function<std::string(int)>& of_rank) {
    on_ranks(GetParam(), [&](Communicator& comm) {
      const auto all = gather_strings(comm, of_rank(comm.rank()));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(comm.size()));
      for (int r = 0; r < comm.size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], of_rank(r));
    });
  }
};

TEST_P(GatherStringsTest, NothingToSay) {
  expect_all([](int) { return std::string(); });
}

TEST_P(GatherStringsTest, ShortAndLongTogether) {
  expect_all([](int rank) {
    return std::string(static_cast<std::size_t>(rank % 3) * 777, static_cast<char>('a' + rank));
  });
}

TEST_P(GatherStringsTest, AroundWhatFitsIntoOneExchange) {
  for (const std::size_t most : {503U, 504U, 505U, 511U, 512U, 513U}) {
    expect_all([&](int rank) { return std::string(most - static_cast<std::size_t>(rank), 'x'); });
  }
}

TEST_P(GatherStringsTest, AnyBytes) {
  expect_all([](int rank) {
    std::string bytes;
    for (int i = 0; i < 3000; ++i) bytes.push_back(static_cast<char>(i * (rank + 1)));
    return bytes;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GatherStringsTest, ::testing::ValuesIn(testing::rank_cases()),
                         testing::rank_case_name);

}  // namespace
}  // namespace switchyard::gather_strings_test
