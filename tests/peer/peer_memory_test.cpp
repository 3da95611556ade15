// SPDX-License-Identifier: Apache-2.0
// Ranks that meet in each other's memory: what they tell each other, their heaps, and what becomes
// of the others when one fails.
#include "peer/peer_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "support/device/forwarding_device.h"
#include "support/errors.h"
#include "support/layer/layer_alone.h"
#include "support/ranks.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::peer_memory_test {
namespace {

using namespace std::chrono_literals;
using testing::error_of;
using testing::ForwardingDevice;
using testing::kTestTimeout;
using testing::Outcome;
using testing::outcome_of;
using testing::Random;
using Clock = std::chrono::steady_clock;

Device one_thread() { return Device::cpu({.num_threads = 1}); }

void delay(Random& random) {
  if (random.below(8) == 0) std::this_thread::sleep_for(random.below(500) * 1us);
}

std::int64_t word_of(int rank, int round, std::int64_t i) {
  return (rank * 10000LL + round) * 1000 + i;
}

class PeerMeetingsTest : public ::testing::TestWithParam<int> {
 protected:
  static void on_ranks(const std::function<void(Communicator&)>& body) {
    run_ranks(GetParam(), body, {.timeout = kTestTimeout});
  }
};

TEST_P(PeerMeetingsTest, GatherWordsAndRecordsOfAllRanks) {
  on_ranks([](Communicator& comm) {
    const auto memory = PeerMemory::of(comm, one_thread());
    constexpr std::array<std::int64_t, 3> kMostRecord{0, 5, 300};
    const std::array<PeerMeetings, 3> channels{PeerMeetings(memory, kMostRecord[0]),
                                               PeerMeetings(memory, kMostRecord[1]),
                                               PeerMeetings(memory, kMostRecord[2])};
    Random alike(7);
    Random own(static_cast<std::uint64_t>(comm.rank()));
    int num_wrong = 0;
    for (int round = 0; round < 300; ++round) {
      const auto which = static_cast<std::size_t>(alike.below(3));
      const std::int64_t num_words = 1 + alike.below(kMostMeetWords);
      const std::int64_t record = alike.below(kMostRecord.at(which) + 1);
      Tensor brought({num_words + record}, Dtype::i64);
      const auto numbers = brought.span<std::int64_t>();
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = word_of(comm.rank(), round, static_cast<std::int64_t>(i));
      }
      Tensor gathered({comm.size(), num_words + record}, Dtype::i64);
      delay(own);
      channels.at(which).gather(Meeting::sums, numbers.first(static_cast<std::size_t>(num_words)),
                                brought.view().slice(num_words, num_words + record), gathered);
      for (int r = 0; r < comm.size(); ++r) {
        const auto row = gathered.view().slice(r, r + 1).span<std::int64_t>();
        for (std::size_t i = 0; i < row.size(); ++i) {
          num_wrong += row[i] != word_of(r, round, static_cast<std::int64_t>(i)) ? 1 : 0;
        }
      }
    }
    EXPECT_EQ(num_wrong, 0);
  });
}

// Everybody writes to what everybody lends, and finds there what the others wrote.
TEST_P(PeerMeetingsTest, LendMemoryThatAllRanksReach) {
  on_ranks([](Communicator& comm) {
    const auto memory = PeerMemory::of(comm, one_thread());
    const PeerMeetings meetings(memory, 0);
    Random own(static_cast<std::uint64_t>(comm.rank()));
    const auto rank = static_cast<std::size_t>(comm.rank());
    int num_wrong = 0;
    for (int round = 0; round < 200; ++round) {
      const std::array lent{memory->take({comm.size() + 8 * (round % 5)}, Dtype::i64),
                            memory->take({comm.size()}, Dtype::f32)};
      delay(own);
      const TensorView table = meetings.lend(lent, 3);
      delay(own);
      for (int r = 0; r < comm.size(); ++r) {
        reinterpret_cast<std::int64_t*>(bases_of(table, 0)[r])[rank] =
            word_of(comm.rank(), round, r);
        reinterpret_cast<float*>(bases_of(table, 1)[r])[rank] = static_cast<float>(round);
      }
      meetings.finish({}, 3);
      for (int r = 0; r < comm.size(); ++r) {
        const auto at = static_cast<std::size_t>(r);
        num_wrong += lent[0].span<std::int64_t>()[at] != word_of(r, round, comm.rank()) ? 1 : 0;
        num_wrong += lent[1].span<float>()[at] != static_cast<float>(round) ? 1 : 0;
      }
    }
    EXPECT_EQ(num_wrong, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, PeerMeetingsTest, ::testing::Values(2, 3, 8),
                         ::testing::PrintToStringParamName());

TEST(PeerMemory, IsOneForTheSameDevicesAndAnotherForOthers) {
  run_ranks(3, [](Communicator& comm) {
    const Device device = one_thread();
    const Device other = one_thread();
    const auto memory = PeerMemory::of(comm, device);
    EXPECT_EQ(PeerMemory::of(comm, device), memory);
    const auto second = PeerMemory::of(comm, other);
    EXPECT_NE(second, memory);
    EXPECT_EQ(PeerMemory::of(comm, device), memory);
    EXPECT_EQ(PeerMemory::of(comm, other), second);
    // Every rank knows its device, but from different groups.
    const auto mixed = PeerMemory::of(comm, comm.rank() == 0 ? other : device);
    EXPECT_NE(mixed, memory);
    EXPECT_NE(mixed, second);
    Tensor gathered({3, 1}, Dtype::i64);
    const std::array<std::int64_t, 1> own{comm.rank()};
    PeerMeetings(mixed, 0).gather(Meeting::sums, own, {}, gathered);
    EXPECT_EQ(gathered.span<std::int64_t>()[2], 2);
  });
}

TEST(PeerHeap, ReusesWhatIsGivenBackAndFreesNothing) {
  auto heap = backend_of(Device()).make_peer_heap({});
  TensorView first = heap->take({100}, Dtype::f32);
  const auto* const data = first.data();
  const auto bytes = heap->bytes_held();
  EXPECT_GE(bytes, 400);
  EXPECT_TRUE(heap->holds(first.slice(99, 100)));
  EXPECT_FALSE(heap->holds(Tensor({100}, Dtype::f32)));
  const TensorView second = heap->take({100}, Dtype::f32);
  EXPECT_NE(second.data(), data);
  first = {};
  EXPECT_EQ(heap->bytes_held(), 2 * bytes);
  const TensorView again = heap->take({50, 2}, Dtype::f32);
  EXPECT_EQ(again.data(), data);
  EXPECT_EQ(heap->bytes_held(), 2 * bytes);
  heap.reset();
  std::memset(second.data(), 1, 400);  // views keep their memory
}

// Remembers its heap.
class WatchedDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const override {
    auto made = base().make_peer_heap(options);
    heap = made;
    return made;
  }
  mutable std::weak_ptr<PeerHeap> heap;
};

TEST(PeerMemory, LastsUntilAllRanksHaveLetGo) {
  std::array<std::weak_ptr<PeerHeap>, 3> heaps;
  run_ranks(3, [&](Communicator& comm) {
    const auto watched = std::make_shared<const WatchedDevice>(one_thread());
    auto memory = PeerMemory::of(comm, Device(watched));
    heaps.at(static_cast<std::size_t>(comm.rank())) = watched->heap;
    const TensorView lent = memory->take({3}, Dtype::i64);
    TensorView table;
    {
      const PeerMeetings meetings(memory, 0);
      table = meetings.lend({&lent, 1}, 0);
    }
    if (comm.rank() == 0) memory.reset();
    comm.barrier();
    EXPECT_FALSE(heaps[0].expired());
    reinterpret_cast<std::int64_t*>(bases_of(table, 0)[0])[comm.rank()] = 5;
    comm.barrier();
    memory.reset();
    comm.barrier();
    for (const auto& heap : heaps) EXPECT_TRUE(heap.expired());
  });
}

// The body meets after all have set up.
Outcome run(int num_ranks, std::chrono::milliseconds timeout,
            const std::function<void(Communicator&, const PeerMeetings&)>& body) {
  return outcome_of(num_ranks, timeout, [&](Communicator& comm) {
    const PeerMeetings meetings(PeerMemory::of(comm, one_thread()), 0);
    body(comm, meetings);
  });
}

Tensor gather_rank(const Communicator& comm, const PeerMeetings& meetings) {
  Tensor gathered({comm.size(), 1}, Dtype::i64);
  const std::array<std::int64_t, 1> own{comm.rank()};
  meetings.gather(Meeting::sums, own, {}, gathered);
  return gathered;
}

TEST(PeerFailure, ARankThatStaysAwayIsNamedByAllAfterTheTimeout) {
  const Outcome outcome = run(4, 300ms, [](Communicator& comm, const PeerMeetings& meetings) {
    const auto begin = Clock::now();
    const bool is_late = comm.rank() == 2;
    std::this_thread::sleep_for(is_late ? 900ms : comm.rank() * 20ms);
    const auto came = Clock::now();
    try {
      (void)gather_rank(comm, meetings);
    } catch (const CommunicationError&) {
      EXPECT_GT(Clock::now() - begin, 250ms);
      EXPECT_LT(Clock::now() - came, is_late ? 200ms : 1500ms);
      throw;
    }
  });
  outcome.expect_same(4);
  EXPECT_EQ(outcome.named.at(0), std::vector{2});
  EXPECT_NE(outcome.messages.at(0).find(
                "rank 2 did not come to the exchange of a batch's sums within 0.3 s (rank "),
            std::string::npos)
      << outcome.messages.at(0);
  const Outcome after = run(4, 60s, [](Communicator& comm, const PeerMeetings& meetings) {
    EXPECT_EQ(gather_rank(comm, meetings).span<std::int64_t>()[3], 3);
  });
  EXPECT_EQ(after.reported, "");
}

// Those that arrive only after somebody gave up have given up, too: nobody waits for them.
TEST(PeerFailure, RanksThatGaveUpTooAreNotBlamed) {
  const Outcome outcome = run(4, 300ms, [](Communicator& comm, const PeerMeetings& meetings) {
    if (comm.rank() == 0) {
      const auto error = error_of<CommunicationError>([&] { (void)gather_rank(comm, meetings); });
      EXPECT_NE(error.find("ranks 1, 2 did not come"), std::string::npos) << error;
    }
    if (comm.rank() == 1 || comm.rank() == 2) std::this_thread::sleep_for(700ms);
    (void)gather_rank(comm, meetings);
  });
  outcome.expect_same(4);
  EXPECT_EQ(outcome.named.at(3), (std::vector{1, 2}));
}

TEST(PeerFailure, AThrowEndsTheWaitsOfTheOthersAtOnce) {
  const Outcome outcome = run(4, 60s, [](Communicator& comm, const PeerMeetings& meetings) {
    (void)gather_rank(comm, meetings);
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(50ms);
      throw std::runtime_error("out of coffee");
    }
    (void)gather_rank(comm, meetings);
  });
  EXPECT_EQ(outcome.reported, "out of coffee");
  EXPECT_LT(outcome.time, 10s);
  outcome.expect_same(3);
  EXPECT_EQ(outcome.messages.at(0), "rank 1 gave up: out of coffee");
  EXPECT_EQ(outcome.named.at(0), std::vector{1});
}

// The error unwinds the pair before the world hears of it.
TEST(PeerFailure, AThrowEndsTheWaitsInGroupsThatWereSplitOff) {
  const auto begin = Clock::now();
  const auto error = error_of<std::runtime_error>([] {
    run_ranks(4,
              [](Communicator& world) {
                const auto pair = world.split(world.rank() / 2, 0);
                const Device device = one_thread();
                const auto whole = PeerMemory::of(world, device);
                const auto memory = PeerMemory::of(*pair, device);
                EXPECT_NE(memory, whole);
                EXPECT_EQ(PeerMemory::of(world, device), whole);
                const PeerMeetings meetings(memory, 0);
                (void)gather_rank(*pair, meetings);
                if (world.rank() == 3) throw std::runtime_error("out of tea");
                if (world.rank() != 2) return;
                const auto message =
                    error_of<CommunicationError>([&] { (void)gather_rank(*pair, meetings); });
                EXPECT_TRUE(message.starts_with("rank 1 gave up: out of tea")) << message;
              },
              {.timeout = 60s});
  });
  EXPECT_EQ(error, "out of tea");
  EXPECT_LT(Clock::now() - begin, 10s);
}

// Rank 1 gives up because of rank 2, which is not in the pair in which rank 0 waits.
TEST(PeerFailure, ARankOutsideTheGroupIsNamed) {
  std::vector<int> named;
  std::string message;
  (void)error_of<std::runtime_error>([&] {
    run_ranks(3, [&](Communicator& world) {
      const auto group = world.split(world.rank() / 2, 0);
      const auto memory = PeerMemory::of(*group, one_thread());
      const PeerMeetings meetings(memory, 0);
      if (world.rank() == 2) throw std::runtime_error("out of sugar");
      if (world.rank() == 1) world.barrier();
      try {
        (void)gather_rank(*group, meetings);
      } catch (const CommunicationError& error) {
        message = error.what();
        named = error.world_ranks();
        throw;
      }
    });
  });
  EXPECT_NE(message.find("rank 2 gave up: out of sugar"), std::string::npos) << message;
  EXPECT_EQ(named, std::vector{2}) << message;
}

TEST(PeerFailure, RanksInDifferentCallsAreNamed) {
  const Outcome outcome = run(3, 60s, [](Communicator& comm, const PeerMeetings& meetings) {
    if (comm.rank() == 1) return meetings.finish({}, 4);
    (void)meetings.lend({}, 2);
  });
  EXPECT_LT(outcome.time, 10s);
  outcome.expect_same(3);
  const auto& message = outcome.messages.at(0);
  const auto& named = outcome.named.at(0);
  if (named == std::vector{1}) {
    EXPECT_NE(message.find("is in the beginning of a movement, but rank 1 in another call"),
              std::string::npos)
        << message;
  } else {
    EXPECT_EQ(named, (std::vector{0, 2}));
    EXPECT_EQ(message, "rank 1 is in the end of a movement, but ranks 0, 2 in another call");
  }
}

// The same meeting of different movements: one rank dispatches, the other combines.
TEST(PeerFailure, DifferentMovementsAreNamed) {
  const auto error = error_of<CommunicationError>([] {
    run_ranks(2, [](Communicator& comm) {
      Dispatcher dispatcher(comm, ExpertPlacement::contiguous(2, 2),
                            {.plan = {.hidden = 4}, .mover = MoverKind::peer}, one_thread());
      const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({2, 1}, {0, 1}));
      if (comm.rank() == 0) {
        (void)dispatcher.dispatch(plan, Tensor::zeros({2, 4}, Dtype::f32));
      } else {
        Tensor y({2, 4}, Dtype::f32);
        dispatcher.combine(plan, {.rows = dispatcher.take_rows(plan)}, y);
      }
    });
  });
  EXPECT_NE(error.find("is in the beginning of a movement, but rank "), std::string::npos) << error;
}

TEST(PeerFailure, IsPermanentAndLeavesNoPlausibleResult) {
  const Outcome outcome = run(2, 200ms, [](Communicator& comm, const PeerMeetings& meetings) {
    const TensorView lent = meetings.memory().take({4}, Dtype::i64);
    Tensor gathered({2, 1}, Dtype::i64);
    Tensor cleared = Tensor::from<std::int32_t>({3}, {1, 2, 3});
    std::ranges::fill(gathered.span<std::int64_t>(), 7);
    if (comm.rank() == 1) std::this_thread::sleep_for(500ms);
    const std::array<std::int64_t, 1> own{comm.rank()};
    const auto first =
        error_of<CommunicationError>([&] { meetings.gather(Meeting::sums, own, {}, gathered); });
    EXPECT_NE(first, "no error");
    EXPECT_EQ(std::ranges::count(gathered.span<std::int64_t>(), 0), 2);
    EXPECT_EQ(*meetings.memory().failed(), 1U);
    Tensor made = Tensor::zeros({2}, Dtype::f32);
    const TensorView view = made;
    backend_of(Device()).spoil(meetings.memory().failed(), {&view, 1});
    EXPECT_TRUE(std::isnan(made.span<float>()[1]));

    const auto begin = Clock::now();
    EXPECT_EQ(error_of<CommunicationError>([&] { meetings.check(); }), first);
    EXPECT_EQ(error_of<CommunicationError>([&] { meetings.close(); }), first);
    EXPECT_EQ(error_of<CommunicationError>([&] { (void)meetings.lend({&lent, 1}, 0); }), first);
    EXPECT_EQ(error_of<CommunicationError>([&] { meetings.finish(cleared, 0); }), first);
    EXPECT_EQ(std::ranges::count(cleared.span<std::int32_t>(), 0), 3);
    const auto later = error_of<CommunicationError>([&] { comm.barrier(); });
    EXPECT_NE(later.find(first), std::string::npos) << later;
    EXPECT_LT(Clock::now() - begin, 150ms);
  });
  EXPECT_EQ(outcome.reported, "");
}

// A layer's step in which a rank does not take part: neither the step nor the next gives a result.
TEST(PeerFailure, AStepWithoutARankThrowsAndSoDoesTheNext) {
  run_ranks(3,
            [](Communicator& comm) {
              auto options = testing::tiny_layer_options();
              options.mover = MoverKind::peer;
              const auto placement = ExpertPlacement::contiguous(6, 3);
              MoeLayer layer(comm, placement, options, one_thread());
              const auto weights = testing::tiny_layer_weights(options, placement, comm.rank());
              const Tensor x = Random(3).tensor({5, 6}, Dtype::f32);
              SavedForBackward saved;
              (void)layer.forward(weights, {.x = x}, saved);
              if (comm.rank() == 1) std::this_thread::sleep_for(700ms);
              const auto gradients = testing::gradients_for(weights);
              Tensor d_x({5, 6}, Dtype::f32);
              const auto first = error_of<CommunicationError>(
                  [&] { layer.backward(weights, saved, x, {.d_x = d_x, .gradients = gradients}); });
              EXPECT_NE(first.find("rank 1 did not come to the beginning of a movement"),
                        std::string::npos)
                  << first;
              const auto begin = Clock::now();
              const auto second =
                  error_of<CommunicationError>([&] { (void)layer.forward(weights, {.x = x}); });
              EXPECT_NE(second.find("rank 1 did not come"), std::string::npos) << second;
              EXPECT_LT(Clock::now() - begin, 150ms);
            },
            {.timeout = 300ms});
}

}  // namespace
}  // namespace switchyard::peer_memory_test
