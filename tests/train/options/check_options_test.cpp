// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "options/options.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::train::check_options_test {
namespace {

using testing::error_of;

std::string error_of_checking(const Assignments& values, int num_ranks = 4) {
  TrainConfig config;
  assign(config, values);
  return error_of<InvalidArgument>([&] { check(config, num_ranks); });
}

TEST(CheckOptions, DefaultsFitAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 7, 64}) EXPECT_EQ(error_of_checking({}, ranks), "no error");
}

TEST(CheckOptions, HeadsAreOfAnEvenSize) {
  EXPECT_EQ(error_of_checking({{"hidden", "130"}}),
            "--hidden 130 must be --heads 4 times an even number, such as 136");
  EXPECT_EQ(error_of_checking({{"hidden", "12"}}),
            "--hidden 12 must be --heads 4 times an even number, such as 16");
  EXPECT_EQ(error_of_checking({{"hidden", "8"}}), "no error");
}

TEST(CheckOptions, ExpertsAreEnoughAndUsed) {
  EXPECT_EQ(error_of_checking({{"top-k", "9"}}), "--top-k 9 must be at most --experts 8");
  EXPECT_EQ(error_of_checking({{"moe-every", "5"}}),
            "--moe-every 5 must be at most --layers 4: no layer has experts");
  EXPECT_EQ(error_of_checking({{"top-k", "8"}, {"moe-every", "4"}}), "no error");
}

TEST(CheckOptions, RatesFitTheSteps) {
  EXPECT_EQ(error_of_checking({{"learning-rate", "0.0001"}}),
            "--final-learning-rate 0.0003 must be at most --learning-rate 0.0001");
}

TEST(CheckOptions, AxesMakeUpTheRanks) {
  EXPECT_EQ(error_of_checking({{"dp", "2"}, {"ep", "3"}}),
            "--dp 2 × --ep 3 × --sp 1 are 6 ranks, but there are 4; --ep 2 would fit");
  EXPECT_EQ(error_of_checking({{"dp", "2"}, {"ep", "2"}, {"sp", "3"}}, 8),
            "--dp 2 × --ep 2 × --sp 3 are 12 ranks, but there are 8; choose --dp and --sp whose "
            "product divides the ranks, or give --ranks");
  EXPECT_EQ(error_of_checking({{"dp", "3"}}),
            "--dp 3 × --sp 1 must divide the 4 ranks; --ranks 6 would do");
  EXPECT_EQ(error_of_checking({{"dp", "65536"}, {"sp", "65536"}, {"ep", "65536"}}),
            "--dp 65536 × --ep 65536 × --sp 65536 are 281474976710656 ranks, but there are 4; "
            "choose --dp and --sp whose product divides the ranks, or give --ranks");
}

TEST(MeshAxes, ExpertsTakeWhatIsLeft) {
  const auto axes = mesh_axes({.dp = 2, .ep = 0, .sp = 3}, 24);
  ASSERT_EQ(axes.size(), 3U);
  EXPECT_EQ(axes[0].name, "dp");
  EXPECT_EQ(axes[0].size, 2);
  EXPECT_EQ(axes[1].name, "ep");
  EXPECT_EQ(axes[1].size, 4);
  EXPECT_EQ(axes[2].name, "sp");
  EXPECT_EQ(axes[2].size, 3);
}

}  // namespace
}  // namespace switchyard::train::check_options_test
