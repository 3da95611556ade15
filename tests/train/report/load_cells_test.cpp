// SPDX-License-Identifier: Apache-2.0
#include "report/load_cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace switchyard::train::load_cells_test {
namespace {

TEST(ReportLoadCells, SharesAreRelativeToAnEvenOne) {
  const std::vector<LoadRecord> records{{.step = 5, .picks = {{10, 30}, {7, 7}}},
                                        {.step = 10, .picks = {{20, 20}, {0, 14}}}};
  const auto table = load_table(records);
  EXPECT_EQ(table.last_steps, (std::vector<std::int64_t>{5, 10}));
  ASSERT_EQ(table.layers.size(), 2U);
  EXPECT_EQ(table.layers[0].shares, (std::vector<double>{0.5, 1.0, 1.5, 1.0}));
  EXPECT_EQ(table.layers[1].shares, (std::vector<double>{1.0, 0.0, 1.0, 2.0}));
  EXPECT_EQ(table.layers[0].last_greatest, 1.0);
  EXPECT_EQ(table.layers[1].last_greatest, 2.0);
}

TEST(ReportLoadCells, ManyRecordsShareColumns) {
  std::vector<LoadRecord> records;
  for (int i = 1; i <= 5000; ++i) {
    records.push_back({.step = i, .picks = {{i <= 25 ? 30 : 10, 10}}});
  }
  const auto table = load_table(records);
  ASSERT_EQ(table.last_steps.size(), 200U);
  EXPECT_EQ(table.last_steps.front(), 25);
  EXPECT_EQ(table.last_steps.back(), 5000);
  EXPECT_DOUBLE_EQ(table.layers[0].shares[0], 1.5);
  EXPECT_DOUBLE_EQ(table.layers[0].shares[1], 1.0);
}

TEST(ReportLoadCells, ManyExpertsShareRowsThatShowTheMostUneven) {
  std::vector<std::int64_t> picks(256, 100);
  picks[5] = 200;   // beside 4, 6, 7
  picks[250] = 10;  // beside 248, 249, 251
  const std::vector<LoadRecord> records{{.step = 1, .picks = {picks}}};
  const auto cells = load_table(records).layers[0];
  EXPECT_EQ(cells.experts_a_row, 4);
  ASSERT_EQ(cells.num_rows, 64);
  const double total = 256 * 100 + 100 - 90;
  EXPECT_DOUBLE_EQ(cells.shares[1], 200.0 * 256 / total);
  EXPECT_DOUBLE_EQ(cells.shares[62], 10.0 * 256 / total);
  EXPECT_DOUBLE_EQ(cells.last_greatest, 200.0 * 256 / total);
}

TEST(ReportLoadCells, ManyLayersHaveFewerColumns) {
  std::vector<LoadRecord> records(1000);
  for (auto& record : records) {
    record.picks.assign(64, std::vector<std::int64_t>(256, 1));
  }
  const auto table = load_table(records);
  EXPECT_GE(table.last_steps.size(), 24U);
  EXPECT_LE(table.last_steps.size() * 64 * 64, 150'000U);
}

TEST(ReportLoadCells, MissingRecordsLayersAndExperts) {
  EXPECT_TRUE(load_table({}).layers.empty());
  EXPECT_TRUE(load_table(std::vector<LoadRecord>{{.step = 1, .picks = {}}}).layers.empty());
  // Nothing picked; no such layer; fewer experts than in other records.
  const std::vector<LoadRecord> records{{.step = 1, .picks = {{0, 0}, {1, 1}}},
                                        {.step = 2, .picks = {{4}}}};
  const auto table = load_table(records);
  ASSERT_EQ(table.layers.size(), 2U);
  const auto& first = table.layers[0].shares;
  EXPECT_TRUE(std::isnan(first[0]) && std::isnan(first[2]));
  EXPECT_EQ(first[1], 2.0);
  EXPECT_EQ(first[3], 0.0);
  EXPECT_TRUE(std::isnan(table.layers[1].last_greatest));
}

TEST(ReportLoadCells, ColoursAreStrongestWhereFewSharesLie) {
  const auto strongest = [](double share, std::size_t cells) {
    LoadTable table;
    table.layers.push_back({.shares = std::vector<double>(1000, 1.0)});
    std::fill_n(table.layers[0].shares.begin(), cells, share);
    return strongest_share(table);
  };
  EXPECT_EQ(strongest(1.2, 500), 1.25);
  EXPECT_EQ(strongest(9.0, 5), 1.25);  // too few to matter
  EXPECT_EQ(strongest(1.9, 500), 2.0);
  EXPECT_EQ(strongest(0.4, 500), 3.0);
  EXPECT_EQ(strongest(0.0, 500), 4.0);
  EXPECT_EQ(strongest(std::nan(""), 1000), 4.0);
}

}  // namespace
}  // namespace switchyard::train::load_cells_test
