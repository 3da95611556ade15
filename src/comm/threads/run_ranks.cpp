// SPDX-License-Identifier: Apache-2.0
// Runs ranks as threads and rethrows the error that came first.
#include "switchyard/run_ranks.h"

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <thread>

#include "comm/backends.h"
#include "comm/failure_listener.h"
#include "comm/threads/thread_communicator.h"
#include "core/require.h"

namespace switchyard {
namespace {

std::shared_ptr<threads::MeetingPoint> make_meeting_point(int num_ranks,
                                                          std::chrono::milliseconds timeout) {
  require(0 < num_ranks && num_ranks <= kMostThreadRanks, "num_ranks ({}) must be 1 to {}",
          num_ranks, int{kMostThreadRanks});
  require(timeout.count() > 0, "timeout ({} ms) must be positive", timeout.count());
  return std::make_shared<threads::MeetingPoint>(num_ranks, std::min(timeout, kLongestTimeout));
}

// Replaces anything that is not a std::exception, since callers catch nothing else.
std::exception_ptr of_the_library(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception&) {
    return error;
  } catch (...) {
    return std::make_exception_ptr(
        Error(fmt::format("rank {} threw something that is not a std::exception", rank)));
  }
}

// Tells the other ranks about the error, even if there is no memory left for its message.
void give_up(std::optional<threads::ThreadCommunicator>& comm, threads::MeetingPoint& point,
             int rank, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    try {
      if (comm) return FailureListeners::abort_for(*comm, thrown.what(), thrown);
      point.fail(rank, {thrown.what(), {rank}});
    } catch (const std::bad_alloc&) {
      point.fail(rank, {"out of memory", {rank}});
    }
  }
}

}  // namespace

void run_ranks(int num_ranks, const std::function<void(Communicator&)>& fn,
               const RankOptions& options) {
  require(fn != nullptr, "fn is empty: pass a function");
  const auto point = make_meeting_point(num_ranks, options.timeout);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(num_ranks));
  const auto run_rank = [&](int r) {
    auto& error = errors[static_cast<std::size_t>(r)];
    std::optional<threads::ThreadCommunicator> comm;
    try {
      fn(comm.emplace(point, r));
    } catch (...) {
      error = of_the_library(std::current_exception(), r);
      give_up(comm, *point, r, error);
    }
  };
  std::vector<std::thread> ranks;
  try {
    for (int r = 0; r < num_ranks; ++r) ranks.emplace_back(run_rank, r);
  } catch (const std::exception& error) {  // running ranks must not wait for missing ones
    const int rank = static_cast<int>(ranks.size());
    errors[ranks.size()] = std::make_exception_ptr(DeviceError(
        fmt::format("cannot start a thread for rank {} of {}: {}", rank, num_ranks, error.what())));
    std::optional<threads::ThreadCommunicator> none;
    give_up(none, *point, rank, errors[ranks.size()]);
  }
  for (std::thread& rank : ranks) rank.join();

  const int first = point->first_failed_rank();
  if (first >= 0 && errors[static_cast<std::size_t>(first)]) {
    std::rethrow_exception(errors[static_cast<std::size_t>(first)]);
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::vector<std::unique_ptr<Communicator>> make_thread_ranks(int num_ranks,
                                                             const RankOptions& options) {
  const auto point = make_meeting_point(num_ranks, options.timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < num_ranks; ++r) {
    ranks.push_back(std::make_unique<threads::ThreadCommunicator>(point, r));
  }
  return ranks;
}

namespace threads {

BackendEntry backend() {
  return {"threads",
          [] {
            return Availability{true, "ranks are threads of one process"};
          },
          [](const ConnectOptions& options) -> std::unique_ptr<Communicator> {
            return std::make_unique<ThreadCommunicator>(make_meeting_point(1, options.timeout), 0);
          }};
}

}  // namespace threads
}  // namespace switchyard
