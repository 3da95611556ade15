// SPDX-License-Identifier: Apache-2.0
#include "bench/rank_timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "between_ranks.h"

namespace switchyard::cli {
namespace {

std::int64_t nanoseconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Returns the same value on every rank, so that all ranks derive the same number of rounds from it.
double seconds_a_round(Communicator& comm, const Device& device, int rounds,
                       const std::function<void()>& work) {
  device.synchronize();
  comm.barrier();
  const auto begin = nanoseconds_now();
  for (int i = 0; i < rounds; ++i) work();
  device.synchronize();
  const auto end = nanoseconds_now();
  const auto first = reduce_number(comm, begin, ReduceOp::min);
  const auto last = reduce_number(comm, end, ReduceOp::max);
  return static_cast<double>(last - first) * 1e-9 / rounds;
}

}  // namespace

CoolAndHot time_on_ranks(Communicator& comm, const Device& device,
                         const std::function<void()>& work) {
  constexpr int kMostRounds = 1000;
  work();
  const double estimate = seconds_a_round(comm, device, 2, work);
  const int warm_ups = static_cast<int>(std::ceil(Heat::kWarmUp / estimate));
  const int rounds =
      std::clamp(static_cast<int>(Heat::kBurst / estimate) - warm_ups, 1, kMostRounds);
  std::vector<double> cool;
  for (int burst = 0; burst < Heat::kBursts; ++burst) {
    std::this_thread::sleep_for(Heat::kPause);
    for (int i = 0; i < warm_ups; ++i) work();
    cool.push_back(seconds_a_round(comm, device, rounds, work));
  }
  const int load = static_cast<int>(std::ceil(Heat::kLoad / median(cool)));
  for (int i = 0; i < load; ++i) work();
  std::vector<double> hot;
  for (int burst = 0; burst < Heat::kBursts; ++burst) {
    hot.push_back(seconds_a_round(comm, device, rounds, work));
  }
  return {median(cool), median(hot)};
}

}  // namespace switchyard::cli
