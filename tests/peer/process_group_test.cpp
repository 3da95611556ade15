// SPDX-License-Identifier: Apache-2.0
// Memory that ranks reach, be they threads or processes: how it grows, and what is left of it.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/heap_space.h"
#include "peer/peer_memory.h"
#include "support/device/forwarding_device.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace switchyard::testing::process_group_test {
namespace {

class PeerGroupTest : public ::testing::TestWithParam<RankCase> {};

std::int64_t value_at(int rank, int from, std::int64_t piece) {
  return 1000 * piece + 10 * rank + from;
}

// Pieces larger than those by which a heap grows, none of which was there when the group was made.
TEST_P(PeerGroupTest, AllRanksReachTheGrownPartOfAHeap) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto memory = PeerMemory::of(comm, Device());
    const PeerMeetings meetings(memory, 0);
    std::vector<TensorView> kept;
    for (std::int64_t piece = 1; piece < 5; ++piece) {
      // Another size on every rank.
      const std::int64_t count = (std::int64_t{1} << 20) * (piece + comm.rank()) + 17;
      kept.push_back(memory->take({count}, Dtype::i64));
      const TensorView table = meetings.lend({&kept.back(), 1}, 0);
      for (int to = 0; to < comm.size(); ++to) {
        auto* const words = reinterpret_cast<std::int64_t*>(bases_of(table, 0)[to]);
        const std::int64_t theirs = (std::int64_t{1} << 20) * (piece + to) + 17;
        words[comm.rank()] = value_at(to, comm.rank(), piece);
        words[theirs - 1 - comm.rank()] = value_at(to, comm.rank(), piece);
      }
      meetings.finish({}, 0);
      const auto words = kept.back().span<std::int64_t>();
      for (int from = 0; from < comm.size(); ++from) {
        EXPECT_EQ(words[static_cast<std::size_t>(from)], value_at(comm.rank(), from, piece));
        EXPECT_EQ(words[words.size() - 1 - static_cast<std::size_t>(from)],
                  value_at(comm.rank(), from, piece));
      }
    }
    meetings.close();
  });
}

// One rank's heap grows while the others are in a meeting that it has not come to.
TEST_P(PeerGroupTest, AHeapGrowsWhileOthersWait) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const auto memory = PeerMemory::of(comm, Device());
    const PeerMeetings meetings(memory, 0);
    for (int round = 0; round < 3; ++round) {
      TensorView large;
      if (comm.rank() == comm.size() - 1) {
        large = memory->take({(std::int64_t{3} << 20) << round}, Dtype::i64);
      }
      meetings.close();
    }
  });
}

std::ptrdiff_t num_descriptors() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

TEST_P(PeerGroupTest, NothingIsLeftOpen) {
  const bool are_threads = GetParam().backend == "threads";
  on_ranks(GetParam(), [&](Communicator& comm) {
    const bool counts = !are_threads || comm.rank() == 0;  // threads would count each other's
    const auto use = [&] {
      const auto part = comm.split(0, comm.rank());
      const auto memory = PeerMemory::of(*part, Device());
      const PeerMeetings meetings(memory, 0);
      meetings.close();
    };
    use();
    comm.barrier();
    const auto before = counts ? num_descriptors() : 0;
    comm.barrier();
    for (int i = 0; i < 3; ++i) use();
    comm.barrier();
    EXPECT_EQ(counts ? num_descriptors() : 0, before);
    comm.barrier();
  });
}

// Reaches no other.
class LonelyDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::string reason_against_reaching(const DeviceIdentity& /*other*/) const override {
    return "its GPUs 0 and 1 have no peer access to each other";
  }
};

// Threads reach all memory of their process, and are not asked.
TEST_P(PeerGroupTest, ProcessesThatCannotReachEachOtherAreNamed) {
  const bool are_processes = GetParam().backend != "threads" && GetParam().size > 1;
  on_ranks(GetParam(), [&](Communicator& comm) {
    const Device lonely(std::make_shared<const LonelyDevice>(Device()));
    const auto message =
        error_of<Unsupported>([&] { PeerMemory::of(comm, comm.rank() == 1 ? lonely : Device()); });
    const std::string expected = are_processes
                                     ? "rank 1: it cannot reach the memory of rank 0: its GPUs 0 "
                                       "and 1 have no peer access to each other"
                                     : "no error";
    EXPECT_NE(message.find(expected), std::string::npos) << message;
    PeerMeetings(PeerMemory::of(comm, Device()), 0).close();  // nothing is broken
  });
}

// Maps nothing of what others have.
class UnmappingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::shared_ptr<ReachedHeap> reach_heap(std::int64_t /*reserved_bytes*/) const override {
    class Heap final : public ReachedHeap {
      std::byte* base() const override { return nullptr; }
      void map(const HeapPiece& /*piece*/) override {
        throw DeviceError("this container forbids it");
      }
    };
    return std::make_shared<Heap>();
  }
};

TEST_P(PeerGroupTest, AProcessThatCannotMapIsNamedAtOnce) {
  const bool are_processes = GetParam().backend != "threads" && GetParam().size > 1;
  on_ranks(GetParam(), [&](Communicator& comm) {
    const Device unmapping(std::make_shared<const UnmappingDevice>(Device()));
    for (int i = 0; i < 5; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      const auto message = error_of<Unsupported>(
          [&] { PeerMemory::of(comm, comm.rank() == 1 ? unmapping : Device()); });
      const std::string expected = are_processes ? "rank 1 cannot map " : "no error";
      EXPECT_NE(message.find(expected), std::string::npos) << message;
      EXPECT_LT(std::chrono::steady_clock::now() - begin, kTestTimeout / 4);
    }
    PeerMeetings(PeerMemory::of(comm, Device()), 0).close();  // nothing is broken
  });
}

// Ranks that let go at about the same time do not take each other for dead.
TEST_P(PeerGroupTest, ManyGroupsEndWithoutErrors) {
  on_ranks(GetParam(), [](Communicator& comm) {
    const Device device;
    for (int i = 0; i < 50; ++i) {
      auto memory = PeerMemory::of(comm, device);
      auto meetings = std::make_unique<PeerMeetings>(memory, 0);
      meetings->close();
      if ((i + comm.rank()) % 3 == 0) {
        meetings.reset();
        memory.reset();
        continue;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100 * comm.rank()));
      memory->check();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, PeerGroupTest, ::testing::ValuesIn(rank_cases()), rank_case_name);

TEST(HeapSpace, NeighboursThatAreFreeAreOne) {
  HeapSpace space;
  EXPECT_FALSE(space.take(1));
  space.grow(100);
  const auto a = space.take(30);
  const auto b = space.take(30);
  const auto c = space.take(40);
  ASSERT_TRUE(a && b && c);
  EXPECT_EQ(*a, 0);
  EXPECT_EQ(*b, 30);
  EXPECT_EQ(*c, 60);
  EXPECT_FALSE(space.take(1));
  space.give_back(*a);
  space.give_back(*c);
  EXPECT_FALSE(space.take(50));
  space.give_back(*b);
  EXPECT_EQ(space.take(100), 0);
  space.grow(20);
  EXPECT_EQ(space.end(), 120);
  EXPECT_EQ(space.take(20), 100);
}

}  // namespace
}  // namespace switchyard::testing::process_group_test
