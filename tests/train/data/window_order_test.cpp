// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>

#include "data/corpus.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::train::window_order_test {
namespace {

using testing::error_of;

// Byte i of it is not that of its neighbours.
std::string text_of(std::size_t size) {
  std::string text;
  for (std::size_t i = 0; i < size; ++i) text += static_cast<char>(i % 251);
  return text;
}

// Returns where the windows of an order begin in the text.
std::vector<std::int64_t> shown(const std::string& text, const WindowOrder& order,
                                std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> starts;
  for (std::int64_t n = first; n < first + count; ++n) {
    starts.push_back(order.window(n).data() - text.data());
  }
  return starts;
}

TEST(WindowOrder, ShowsEveryWindowOnceAnEpoch) {
  for (const std::int64_t num_windows : {1, 2, 3, 4, 5, 16, 17, 257, 1000}) {
    const auto text = text_of(static_cast<std::size_t>(num_windows * 7 + 1 + 3));
    const WindowOrder order(text, 7, 5);
    ASSERT_EQ(order.windows_in_an_epoch(), num_windows);
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<std::int64_t> seen;
      for (const auto start : shown(text, order, epoch * num_windows, num_windows)) {
        EXPECT_EQ(start % 7, 0);
        EXPECT_TRUE(seen.insert(start / 7).second);
      }
      EXPECT_EQ(*seen.rbegin(), num_windows - 1);
    }
    EXPECT_EQ(order.window(num_windows).size(), 8U);
  }
}

TEST(WindowOrder, DependsOnSeedAndEpoch) {
  const auto text = text_of(1001);
  const WindowOrder order(text, 10, 1);
  const auto first = shown(text, order, 0, 100);
  EXPECT_EQ(shown(text, WindowOrder(text, 10, 1), 0, 100), first);
  EXPECT_NE(shown(text, WindowOrder(text, 10, 2), 0, 100), first);
  EXPECT_NE(shown(text, order, 100, 100), first);
}

// A run that is resumed by another version must see what it would have seen.
TEST(WindowOrder, IsTheSameInEveryVersion) {
  const auto text = text_of(1001);
  const WindowOrder order(text, 10, 1);
  EXPECT_EQ(shown(text, order, 0, 8),
            (std::vector<std::int64_t>{330, 570, 150, 560, 450, 460, 750, 630}));
  EXPECT_EQ(shown(text, order, 100, 4), (std::vector<std::int64_t>{270, 10, 160, 850}));
}

TEST(WindowOrder, ManyEpochsAreFine) {
  const auto text = text_of(29);
  const WindowOrder order(text, 4, 9);
  const auto window = order.window(std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(window.size(), 5U);
}

TEST(WindowOrder, HasNoWindowBeforeTheFirst) {
  const auto text = text_of(29);
  EXPECT_EQ(error_of<InvalidArgument>([&] { WindowOrder(text, 4, 9).window(-1); }),
            "there is no window -1");
}

TEST(WindowOrder, NeedsAWindow) {
  EXPECT_EQ(WindowOrder(text_of(9), 8, 1).windows_in_an_epoch(), 1);
  EXPECT_EQ(error_of<InvalidArgument>([] { WindowOrder(text_of(8), 8, 1); }),
            "the corpus has 8 bytes to train on, but a context of 8 needs at least 9; use more "
            "text or a smaller --context");
}

TEST(HeldOutWindows, AreSpreadEvenlyAndDoNotOverlap) {
  const auto text = text_of(1004);
  const auto starts = [&](std::int64_t most) {
    std::vector<std::int64_t> result;
    for (const auto window : held_out_windows(text, 9, most)) {
      EXPECT_EQ(window.size(), 10U);
      result.push_back(window.data() - text.data());
    }
    return result;
  };
  EXPECT_EQ(starts(1), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(starts(4), (std::vector<std::int64_t>{0, 250, 500, 750}));
  EXPECT_EQ(starts(3), (std::vector<std::int64_t>{0, 330, 660}));
  const auto all = starts(1000);
  ASSERT_EQ(all.size(), 100U);
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], 10 * static_cast<int>(i));
}

TEST(HeldOutWindows, NeedAWindow) {
  EXPECT_EQ(error_of<InvalidArgument>([] { held_out_windows(text_of(8), 8, 4); }),
            "the corpus has 8 bytes held out, but a context of 8 needs at least 9; use more text "
            "or a smaller --context");
}

}  // namespace
}  // namespace switchyard::train::window_order_test
