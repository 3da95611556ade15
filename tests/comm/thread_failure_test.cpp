// SPDX-License-Identifier: Apache-2.0
// Effects on the other ranks when a rank that is a thread fails, leaves, or stays away.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <thread>

#include "support/child.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::thread_failure_test {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::Outcome;
using testing::outcome_of;

TEST(ThreadFailure, AThrowWakesTheOthersAtOnceAndIsReported) {
  const Outcome outcome = outcome_of(4, 60s, [](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 2) throw std::runtime_error("out of coffee");
    Tensor one({1}, Dtype::f32);
    Tensor all({4}, Dtype::f32);
    comm.all_gather(one, all);
  });
  EXPECT_EQ(outcome.reported, "out of coffee");
  EXPECT_LT(outcome.time, 10s);
  ASSERT_EQ(outcome.messages.size(), 3U);
  for (const auto& [rank, message] : outcome.messages) {
    EXPECT_EQ(message, "all_gather #2: rank 2 gave up: out of coffee");
    EXPECT_EQ(outcome.named.at(rank), std::vector{2});
  }
}

TEST(ThreadFailure, ARankThatReturnsEarlyIsNamed) {
  const Outcome outcome = outcome_of(3, 60s, [](Communicator& comm) {
    if (comm.rank() != 1) comm.barrier();
  });
  EXPECT_LT(outcome.time, 10s);
  ASSERT_EQ(outcome.messages.size(), 2U);
  for (const auto& [rank, message] : outcome.messages) {
    EXPECT_EQ(message, "barrier #1: rank 1 left before it");
    EXPECT_EQ(outcome.named.at(rank), std::vector{1});
  }
}

TEST(ThreadFailure, ARankThatStaysAwayIsNamedAtTheDeadline) {
  const Outcome outcome = outcome_of(4, 300ms, [](Communicator& comm) {
    if (comm.rank() == 0 || comm.rank() == 3) std::this_thread::sleep_for(1s);
    comm.barrier();
  });
  ASSERT_EQ(outcome.messages.size(), 4U);
  EXPECT_EQ(outcome.messages.at(1), "barrier #1: ranks 0, 3 did not arrive within 0.3 s");
  EXPECT_EQ(outcome.named.at(2), (std::vector{0, 3}));
  // Who comes late learns what happened without waiting.
  EXPECT_NE(outcome.messages.at(0).find("did not arrive within 0.3 s"), std::string::npos);
  EXPECT_LT(outcome.time, 1500ms);
}

TEST(ThreadFailure, AfterAnErrorEveryCallSaysSoAtOnce) {
  const Outcome outcome = outcome_of(2, 200ms, [](Communicator& comm) {
    if (comm.rank() == 1) std::this_thread::sleep_for(500ms);
    const auto first = error_of<CommunicationError>([&] { comm.barrier(); });
    const auto begin = std::chrono::steady_clock::now();
    const auto second = error_of<CommunicationError>([&] { comm.barrier(); });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 100ms);
    EXPECT_EQ(second,
              "barrier: this communicator failed before and can no longer be used: " + first);
  });
  EXPECT_EQ(outcome.reported, "");
}

TEST(ThreadFailure, WaitsBeforeAFailureAreStillCounted) {
  const Outcome outcome = outcome_of(3, 60s, [](Communicator& comm) {
    for (int i = 0; i < 3; ++i) comm.barrier();
    const std::vector before(comm.waited_for().begin(), comm.waited_for().end());
    ASSERT_EQ(before.size(), 3U);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(50ms);
      comm.abort("no more");
    }
    const auto error = error_of<CommunicationError>([&] { comm.barrier(); });
    EXPECT_NE(error.find("no more"), std::string::npos) << error;
    EXPECT_TRUE(std::ranges::equal(comm.waited_for(), before));
  });
  EXPECT_EQ(outcome.reported, "");
}

TEST(ThreadFailure, DifferentCallsAreAnErrorEverywhere) {
  const Outcome outcome = outcome_of(3, 60s, [](Communicator& comm) {
    Tensor one({1}, Dtype::f32);
    Tensor all({3}, Dtype::f32);
    if (comm.rank() == 1) {
      comm.barrier();
    } else {
      comm.all_gather(one, all);
    }
  });
  ASSERT_EQ(outcome.messages.size(), 3U);
  EXPECT_EQ(outcome.messages.at(0),
            "all_gather #1: rank 1 called barrier #1 instead; all ranks must make the same calls "
            "in the same order");
  EXPECT_NE(outcome.messages.at(1).find("rank 0 called all_gather #1 (f32) instead"),
            std::string::npos);
}

TEST(ThreadFailure, DifferentSizesAreAnErrorEverywhere) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor mine({1 + comm.rank()}, Dtype::f32);
    Tensor all({2 * (1 + comm.rank())}, Dtype::f32);
    comm.all_gather(mine, all);
  });
  ASSERT_EQ(outcome.messages.size(), 2U);
  EXPECT_EQ(outcome.messages.at(0), "all_gather #1: rank 1 passed 8 bytes, but rank 0 passed 4");
}

TEST(ThreadFailure, SenderAndReceiverMustCountAlike) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor rows({8, 1}, Dtype::f32);
    Tensor got({8, 1}, Dtype::f32);
    const std::vector<std::int64_t> send{1, 2};
    const std::vector<std::int64_t> recv{comm.rank() == 0 ? 1 : 2, comm.rank() == 0 ? 1 : 2};
    comm.all_to_all(rows, comm.rank() == 0 ? send : std::vector<std::int64_t>{3, 2}, got, recv);
  });
  ASSERT_EQ(outcome.messages.size(), 2U);
  EXPECT_EQ(outcome.messages.at(0),
            "all_to_all #1: rank 1 sends 3 rows to rank 0, which expects 1");
  EXPECT_EQ(outcome.named.at(0), std::vector{1});
  EXPECT_EQ(outcome.named.at(1), std::vector{1});
}

TEST(ThreadFailure, BadArgumentsOnOneRankReachAll) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor values({3}, Dtype::f32);
    comm.broadcast(values, comm.rank() == 1 ? 7 : 0);
  });
  EXPECT_EQ(outcome.reported, "root (7) must be a rank of 2");
  EXPECT_EQ(outcome.messages.at(0), "broadcast #1: rank 1 gave up: root (7) must be a rank of 2");
}

TEST(ThreadFailure, RootsMustAgree) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor values({3}, Dtype::f32);
    comm.broadcast(values, comm.rank());
  });
  EXPECT_NE(outcome.reported.find("called broadcast #1 (f32 from"), std::string::npos)
      << outcome.reported;
}

TEST(ThreadFailure, ReductionsMustAgree) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor values = Tensor::zeros({3}, Dtype::f32);
    comm.all_reduce(values, comm.rank() == 1 ? ReduceOp::max : ReduceOp::sum);
  });
  EXPECT_NE(outcome.messages.at(0).find("rank 1 called all_reduce #1 (max of f32) instead"),
            std::string::npos);
}

TEST(ThreadFailure, RowCountsMustFit) {
  const Outcome outcome = outcome_of(2, 60s, [](Communicator& comm) {
    Tensor rows({8, 1}, Dtype::f32);
    Tensor received({8, 1}, Dtype::f32);
    const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
    const std::vector<std::int64_t> counts{1, comm.rank() == 1 ? huge : 1};
    comm.all_to_all(rows, counts, received, counts);
  });
  EXPECT_EQ(outcome.reported,
            "send_rows [1, 9223372036854775807] need more rows than the tensor [8,1] has, or one "
            "of them is negative");
}

TEST(ThreadFailure, ATimeoutMayBeInfinite) {
  run_ranks(2, [](Communicator& comm) { comm.barrier(); },
            {.timeout = std::chrono::milliseconds::max()});
}

TEST(ThreadFailure, AFailureInTheWorldWakesSubgroups) {
  // Outlive the ranks: a group that the error unwinds is left, which its members may see first.
  std::array<std::unique_ptr<Communicator>, 4> pairs;
  const Outcome outcome = outcome_of(4, 60s, [&](Communicator& comm) {
    auto& pair = pairs.at(static_cast<std::size_t>(comm.rank()));
    pair = comm.split(comm.rank() / 2, 0);
    if (comm.rank() == 3) throw std::runtime_error("gone");
    pair->barrier();  // rank 2 waits here for rank 3, which is rank 1 of its pair
    comm.barrier();
  });
  EXPECT_EQ(outcome.reported, "gone");
  EXPECT_LT(outcome.time, 10s);
  EXPECT_EQ(outcome.messages.at(2),
            "barrier #1: in the parent group: rank 3 gave up: gone; rank 1 of this group is rank 3 "
            "of the world");
  EXPECT_EQ(outcome.named.at(2), std::vector{1});
  EXPECT_EQ(outcome.messages.at(0), "barrier #2: rank 3 gave up: gone");
}

TEST(ThreadFailure, TheFirstErrorIsReportedThoughItsRankEndsLast) {
  const Outcome outcome = outcome_of(3, 60s, [](Communicator& comm) {
    if (comm.rank() != 2) return comm.barrier();
    try {
      Tensor strided({4, 4}, Dtype::f32);
      comm.broadcast(TensorView(strided.data(), Dtype::f32, {4, 2}, 4), 0);
    } catch (const InvalidArgument&) {
      std::this_thread::sleep_for(300ms);
      throw;
    }
  });
  EXPECT_EQ(outcome.reported, "values [4,2] is not contiguous (row stride 4)");
}

TEST(ThreadFailure, AThrownNonExceptionBecomesAnErrorOnAllRanks) {
  std::string seen_by_others;
  const auto reported = error_of<Error>([&] {
    run_ranks(2, [&](Communicator& comm) {
      if (comm.rank() == 1) throw 42;
      seen_by_others = error_of<CommunicationError>([&] { comm.barrier(); });
    });
  });
  EXPECT_EQ(reported, "rank 1 threw something that is not a std::exception");
  EXPECT_NE(seen_by_others.find(reported), std::string::npos) << seen_by_others;
}

// Alone; while it is in a barrier, a second thread calls it.
class CalledByTwo final : public Communicator {
 public:
  CalledByTwo() : Communicator(0, 1, 1s) {}
  std::string_view backend() const override { return "test"; }

  std::string error_of_the_second = "no error";

 private:
  void do_barrier() override {
    std::thread([&] {
      error_of_the_second = error_of<InvalidArgument>([&] { barrier(); });
    }).join();
  }
  void do_all_to_all(const Rows&, const Rows&, std::int64_t) override {}
  void do_all_gather(const Bytes&, const Bytes&) override {}
  void do_broadcast(const Bytes&, int) override {}
  std::unique_ptr<Communicator> do_split(int, int) override { return nullptr; }
  void do_abort(const std::string&, const std::vector<int>&) override {}
};

TEST(ThreadFailure, TwoThreadsInOneCommunicatorAreRefused) {
  CalledByTwo comm;
  comm.barrier();
  EXPECT_EQ(comm.error_of_the_second,
            "barrier: another thread is in a collective of this communicator; only one thread may "
            "use it at a time");
  comm.error_of_the_second = "no error";
  comm.barrier();  // the first thread's goes on
  EXPECT_NE(comm.error_of_the_second, "no error");
}

TEST(ThreadFailure, AForkedProcessHasNoPartInTheGroup) {
  run_ranks(2, [&](Communicator& comm) {
    comm.barrier();
    if (comm.rank() == 0) {
      const auto error = testing::in_child([&] {
        const auto first = error_of<CommunicationError>([&] { comm.barrier(); });
        comm.abort("the child gives up");
        return first;
      });
      EXPECT_NE(error.find("belongs to the parent process and cannot be used after fork()"),
                std::string::npos)
          << error;
    }
    comm.barrier();
  });
}

TEST(ThreadFailure, RanksMustBePositive) {
  EXPECT_EQ(error_of<InvalidArgument>([] { run_ranks(0, [](Communicator&) {}); }),
            "num_ranks (0) must be 1 to 4096");
}

TEST(ThreadRanks, MayBeHandedToThreadsOfTheCaller) {
  auto ranks = make_thread_ranks(3);
  std::vector<std::thread> threads;
  std::vector<std::int32_t> sums(3);
  for (std::size_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Tensor sum = Tensor::from<std::int32_t>({1}, {1 << r});
      ranks[r]->all_reduce(sum);
      sums[r] = sum.span<std::int32_t>()[0];
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(sums, (std::vector<std::int32_t>{7, 7, 7}));
}

TEST(MappedBuffers, ShowEveryRanksMemory) {
  run_ranks(4, [](Communicator& comm) {
    MappedBuffers* buffers = comm.mapped_buffers();
    ASSERT_NE(buffers, nullptr);
    for (int round = 0; round < 20; ++round) {
      Tensor mine({4}, Dtype::i32);
      const TensorView view = mine;
      const auto all = buffers->map({&view, 1});
      for (const auto& peer : all) {  // everybody writes into everybody's memory
        peer[0].span<std::int32_t>()[static_cast<std::size_t>(comm.rank())] = comm.rank() + round;
      }
      buffers->phase_barrier();
      for (int r = 0; r < 4; ++r) {
        EXPECT_EQ(mine.span<std::int32_t>()[static_cast<std::size_t>(r)], r + round);
      }
    }
  });
}

// Rank 0 waits in a pair for rank 1, which waits in the world for rank 2, which never comes.
TEST(ThreadFailure, ARankThatWaitsInAnotherGroupIsNotBlamed) {
  std::array<std::vector<int>, 2> named;
  std::array<std::string, 2> messages;
  std::atomic<int> num_ended = 0;
  (void)error_of<CommunicationError>([&] {
    run_ranks(3,
              [&](Communicator& world) {
                const auto group = world.split(world.rank() / 2, 0);
                const auto rank = static_cast<std::size_t>(world.rank());
                while (rank == 2 && num_ended < 2) std::this_thread::sleep_for(1ms);
                if (rank == 2) return;
                try {
                  (rank == 0 ? *group : world).barrier();
                } catch (const CommunicationError& error) {
                  named[rank] = error.world_ranks();
                  messages[rank] = error.what();
                  ++num_ended;
                  throw;
                }
              },
              {.timeout = 300ms});
  });
  EXPECT_EQ(named[0], std::vector{2}) << messages[0];
  EXPECT_EQ(named[1], std::vector{2}) << messages[1];
  // Either may come first, and tells the other.
  const auto all = messages[0] + messages[1];
  EXPECT_TRUE(all.find("rank 1 waits in another group for rank 2 of the world") !=
                  std::string::npos ||
              all.find("ranks 0, 2 did not arrive within 0.3 s; rank 0 waits in another group") !=
                  std::string::npos)
      << all;
}

}  // namespace
}  // namespace switchyard::thread_failure_test
