// SPDX-License-Identifier: Apache-2.0
#include "core/memory_cache.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "support/compare.h"

namespace switchyard::memory_cache_test {
namespace {

TEST(MemoryCache, GivesTheSameMemoryAgain) {
  MemoryCache cache;
  const std::byte* first = nullptr;
  {
    const TensorView a = cache.take({100, 30}, Dtype::f32);
    EXPECT_EQ(a.shape(), (Shape{100, 30}));
    EXPECT_EQ(a.dtype(), Dtype::f32);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 64, 0U);
    testing::poison(a);
    first = a.data();
  }
  const auto held = cache.bytes_held();
  EXPECT_GE(held, 100 * 30 * 4);
  EXPECT_LE(held, 100 * 30 * 4 * 9 / 8);
  // Sizes and types that are nearly the same find it too.
  EXPECT_EQ(cache.take({99, 30}, Dtype::f32).data(), first);
  EXPECT_EQ(cache.take({200, 30}, Dtype::bf16).data(), first);
  EXPECT_EQ(cache.bytes_held(), held);
}

TEST(MemoryCache, NeverLendsMemoryTwice) {
  MemoryCache cache;
  std::vector<TensorView> views;
  for (std::int32_t i = 0; i < 20; ++i) {
    views.push_back(cache.take({2000}, Dtype::i32));
    for (auto& v : views.back().span<std::int32_t>()) v = i;
  }
  for (std::int32_t i = 0; i < 20; ++i) {
    for (const auto v : views[static_cast<std::size_t>(i)].span<std::int32_t>()) ASSERT_EQ(v, i);
  }
}

TEST(MemoryCache, KeepsWhatAnyViewStillUses) {
  MemoryCache cache;
  TensorView slice = cache.take({10, 100}, Dtype::i32).slice(4, 5);
  const auto* data = slice.data();
  const TensorView other = cache.take({10, 100}, Dtype::i32);
  EXPECT_NE(other.data(), data - 4 * 400);
  slice = {};
  EXPECT_EQ(cache.take({10, 100}, Dtype::i32).data(), data - 4 * 400);
}

TEST(MemoryCache, BlocksOutliveTheCache) {
  TensorView view;
  {
    MemoryCache cache;
    view = cache.take({5000}, Dtype::f32);
  }
  for (float& v : view.span<float>()) v = 1.0F;
  EXPECT_EQ(view.span<float>().back(), 1.0F);
}

// A step that grows little by little does not leave all its sizes behind.
TEST(MemoryCache, LetsSmallerBlocksGoAsSizesGrow) {
  MemoryCache cache;
  const std::int64_t most = 1 << 22;
  for (std::int64_t bytes = 1 << 16; bytes <= most; bytes += bytes / 16) {
    (void)cache.take({bytes / 4}, Dtype::f32);
  }
  EXPECT_LE(cache.bytes_held(), 3 * most);
}

TEST(MemoryCache, IsEmptyAtFirstAndLendsAddressesForEmptyTensors) {
  MemoryCache cache;
  EXPECT_EQ(cache.bytes_held(), 0);
  const TensorView none = cache.take({0, 7}, Dtype::bf16);
  EXPECT_EQ(none.shape(), (Shape{0, 7}));
  EXPECT_NE(none.data(), nullptr);
}

TEST(MemoryCache, MayBeUsedFromAnyThread) {
  MemoryCache cache;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::int64_t i = 0; i < 200; ++i) {
        const TensorView view = cache.take({1000 + i}, Dtype::i32);
        const auto values = view.span<std::int32_t>();
        for (auto& v : values) v = t;
        for (const auto v : values) wrong += v == t ? 0 : 1;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace switchyard::memory_cache_test
