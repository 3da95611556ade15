// SPDX-License-Identifier: Apache-2.0
// Meetings are counted in 32 bits, which long runs exceed: channels begin near the limit here.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <limits>
#include <thread>

#include "peer/peer_memory.h"
#include "support/layer/layer_step.h"
#include "support/ranks.h"
#include "switchyard/run_ranks.h"

namespace switchyard::peer_long_runs_test {
namespace {

using namespace std::chrono_literals;
using testing::awkward_piece;
using testing::kTestTimeout;
using testing::LayerProblem;
using testing::LayerResults;
using testing::outcome_of;

constexpr std::uint32_t kMeetingsLeft = 5;  // until the number wraps

// Channels that are made while one lives begin there.
struct NearTheLimit {
  NearTheLimit() {
    PeerMeetings::meetings_before = std::numeric_limits<std::uint32_t>::max() - kMeetingsLeft;
  }
  ~NearTheLimit() { PeerMeetings::meetings_before = 0; }
};

std::int64_t sum_of_ranks(const Communicator& comm, const PeerMeetings& meetings, int round) {
  Tensor gathered({comm.size(), 1}, Dtype::i64);
  const std::array<std::int64_t, 1> own{100 * round + comm.rank()};
  meetings.gather(Meeting::sums, own, {}, gathered);
  std::int64_t sum = 0;
  for (const auto number : gathered.span<std::int64_t>()) sum += number;
  return sum;
}

class PeerLongRuns : public ::testing::TestWithParam<int> {
 protected:
  NearTheLimit near_the_limit_;
};

TEST_P(PeerLongRuns, MeetingsContinueWhenTheirNumberWraps) {
  run_ranks(GetParam(),
            [](Communicator& comm) {
              const PeerMeetings meetings(PeerMemory::of(comm, Device()), 0);
              const std::int64_t ranks = comm.size() * (comm.size() - 1) / 2;
              for (int round = 0; round < 30; ++round) {
                ASSERT_EQ(sum_of_ranks(comm, meetings, round), 100 * round * comm.size() + ranks);
              }
            },
            {.timeout = kTestTimeout});
}

TEST_P(PeerLongRuns, StepsHaveTheSameBitsWhenMeetingNumbersWrap) {
  MoeLayerOptions options{.hidden = 20, .intermediate = 12, .router = RouterOptions::mixtral(6, 2)};
  options.mover = MoverKind::peer;
  LayerProblem problem(options);
  const auto step = [&](Communicator& comm, MoeLayer& layer) {
    const auto weights = MoeParameters::random(options, layer.placement(), comm.rank(), 5);
    const auto in = input_of(problem, awkward_piece(comm, problem.num_tokens));
    return testing::run_step(layer, weights.weights(), in, Biases::none);
  };
  const auto alone = connect();
  auto plain = options;
  plain.mover = MoverKind::automatic;
  MoeLayer layer_alone(*alone, ExpertPlacement::contiguous(6, 1), plain);
  const LayerResults one = step(*alone, layer_alone);
  run_ranks(GetParam(),
            [&](Communicator& comm) {
              MoeLayer layer(comm, ExpertPlacement::contiguous(6, comm.size()), options);
              for (int i = 0; i < 4; ++i) {
                const LayerResults many = step(comm, layer);
                EXPECT_TRUE(same_part(many, awkward_piece(comm, problem.num_tokens), one)) << i;
              }
            },
            {.timeout = kTestTimeout});
}

// At every meeting around the limit.
TEST_P(PeerLongRuns, ARankThatStaysAwayIsNamedWhenMeetingNumbersWrap) {
  const int num_ranks = GetParam();
  for (int last = kMeetingsLeft - 1; last < static_cast<int>(kMeetingsLeft) + 2; ++last) {
    std::atomic<int> num_failed = 0;
    const auto outcome = outcome_of(num_ranks, 300ms, [&](Communicator& comm) {
      const PeerMeetings meetings(PeerMemory::of(comm, Device()), 0);
      for (int round = 0; round < last; ++round) (void)sum_of_ranks(comm, meetings, round);
      if (comm.rank() == 1) {
        while (num_failed < num_ranks - 1) std::this_thread::yield();
        return;
      }
      try {
        (void)sum_of_ranks(comm, meetings, last);
      } catch (...) {
        ++num_failed;
        throw;
      }
      ADD_FAILURE() << "rank " << comm.rank() << " met a rank that was not there";
      ++num_failed;
    });
    outcome.expect_same(static_cast<std::size_t>(num_ranks - 1));
    EXPECT_EQ(outcome.named.at(0), std::vector{1});
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PeerLongRuns, ::testing::Values(2, 3),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace switchyard::peer_long_runs_test
