// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <stdexcept>

#include "support/child.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::thread_pool_test {
namespace {

using testing::error_of;

class ThreadPoolTest : public ::testing::TestWithParam<int> {
 protected:
  ThreadPool pool_{GetParam()};
};

TEST_P(ThreadPoolTest, RunsEveryTaskOnce) {
  EXPECT_EQ(pool_.num_threads(), GetParam());
  for (const std::int64_t count : {0, 1, 2, 3, 100}) {
    std::vector<std::atomic<int>> runs(100);
    std::atomic<int> out_of_range{0};
    pool_.run(count, [&](std::int64_t task, int worker) {
      if (worker < 0 || worker >= GetParam()) ++out_of_range;
      ++runs[static_cast<std::size_t>(task)];
    });
    EXPECT_EQ(out_of_range, 0);
    for (std::int64_t i = 0; i < 100; ++i) {
      EXPECT_EQ(runs[static_cast<std::size_t>(i)], i < count ? 1 : 0);
    }
  }
}

// A task may wait for an earlier one, since that has begun before it: in any other order this
// hangs.
TEST_P(ThreadPoolTest, BeginsTasksInOrder) {
  for (int round = 0; round < 50; ++round) {
    std::vector<std::atomic<bool>> done(40);
    pool_.run(40, [&](std::int64_t task, int /*worker*/) {
      const auto i = static_cast<std::size_t>(task);
      while (i > 0 && !done[i - 1].load()) std::this_thread::yield();
      done[i] = true;
    });
  }
}

TEST_P(ThreadPoolTest, WorkersNeverShareANumber) {
  std::vector<std::atomic<int>> inside(static_cast<std::size_t>(GetParam()));
  std::atomic<bool> shared{false};
  pool_.run(2000, [&](std::int64_t /*task*/, int worker) {
    auto& here = inside[static_cast<std::size_t>(worker)];
    if (here.fetch_add(1) != 0) shared = true;
    here.fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

TEST_P(ThreadPoolTest, ThrowsTheErrorAndStaysUsable) {
  for (const std::int64_t bad : {0, 5, 19}) {
    std::atomic<int> begun{0};
    const auto run = [&] {
      pool_.run(20, [&](std::int64_t task, int /*worker*/) {
        ++begun;
        if (task == bad) throw std::runtime_error("task " + std::to_string(task));
      });
    };
    EXPECT_EQ(error_of<std::runtime_error>(run), "task " + std::to_string(bad));
    EXPECT_GE(begun, bad + 1);
    if (GetParam() == 1) {
      EXPECT_EQ(begun, bad + 1);
    }
    std::atomic<int> after{0};
    pool_.run(20, [&](std::int64_t /*task*/, int /*worker*/) { ++after; });
    EXPECT_EQ(after, 20);
  }
}

TEST_P(ThreadPoolTest, ThrowsOneOfManyErrors) {
  EXPECT_EQ(error_of<std::runtime_error>([&] {
              pool_.run(100, [](std::int64_t /*task*/, int /*worker*/) {
                throw std::runtime_error("bad");
              });
            }),
            "bad");
  pool_.run(1, [](std::int64_t /*task*/, int /*worker*/) {});  // the error is not thrown again
}

// A round's writes are visible after it; rounds follow each other without a pause.
TEST_P(ThreadPoolTest, IsReusedForManyRounds) {
  std::vector<std::int64_t> sums(8, 0);
  const int num_rounds = GetParam() > 2 ? 1000 : 10000;  // more threads than cores take turns
  for (int round = 0; round < num_rounds; ++round) {
    pool_.run(8, [&](std::int64_t task, int /*worker*/) {
      sums[static_cast<std::size_t>(task)] += task + 1;
    });
  }
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), std::int64_t{0}), 36 * num_rounds);
}

// Threads that have gone to sleep wake up again.
TEST_P(ThreadPoolTest, WakesUpAfterAPause) {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> runs{0};
    pool_.run(9, [&](std::int64_t /*task*/, int /*worker*/) { ++runs; });
    EXPECT_EQ(runs, 9);
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 5));

TEST(ThreadPool, OneThreadIsTheCallersOwn) {
  ThreadPool pool(1);
  std::set<std::thread::id> ids;
  pool.run(10,
           [&](std::int64_t /*task*/, int /*worker*/) { ids.insert(std::this_thread::get_id()); });
  EXPECT_EQ(ids, std::set{std::this_thread::get_id()});
}

TEST(ThreadPool, ToleratesCoresThatDoNotExist) {
  const std::vector<int> cores{0, 0, 1000};  // the last is on no machine of ours
  ThreadPool pool(4, cores);
  std::atomic<int> runs{0};
  pool.run(50, [&](std::int64_t /*task*/, int /*worker*/) { ++runs; });
  EXPECT_EQ(runs, 50);
}

TEST(ThreadPool, StaysWithTheProcessThatMadeIt) {
  ThreadPool pool(2);
  const auto error = testing::in_child([&]() -> std::string {
    pool.run(2, [](std::int64_t, int) {});
    return "no error";
  });
  EXPECT_EQ(error,
            "the 2 threads of this device belong to the parent process and do not exist after "
            "fork(); make a new device in this process");
}

TEST(ThreadPool, NeedsAThread) {
  EXPECT_EQ(error_of<InvalidArgument>([] { const ThreadPool pool(0); }),
            "num_threads (0) must be 1 to 4096");
}

}  // namespace
}  // namespace switchyard::thread_pool_test
