// SPDX-License-Identifier: Apache-2.0
// Meetings with a deadline. A rank spins briefly and then blocks; a failure of any rank wakes it at
// once.
#include "comm/threads/meeting_point.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <thread>

#include "comm/world_numbers.h"
#include "core/require.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace switchyard::threads {
namespace {

// About a millisecond. Ranks that have a core each often arrive within less than that, and a
// wake-up costs about a tenth of it.
constexpr int kSpins = 50000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

std::string seconds(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", static_cast<double>(time.count()) / 1000.0);
}

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

}  // namespace

MeetingPoint::MeetingPoint(int size, std::chrono::milliseconds timeout)
    : ranks_(static_cast<std::size_t>(size)),
      timeout_(timeout),
      world_ranks_(static_cast<std::size_t>(size)) {
  std::iota(world_ranks_.begin(), world_ranks_.end(), 0);
}

MeetingPoint::MeetingPoint(const std::shared_ptr<MeetingPoint>& parent, std::vector<int> members)
    : ranks_(members.size()),
      timeout_(parent->timeout()),
      parent_(parent),
      members_(std::move(members)) {
  for (const int r : members_) {
    world_ranks_.push_back(parent->world_ranks_[static_cast<std::size_t>(r)]);
  }
}

std::shared_ptr<MeetingPoint> MeetingPoint::make_child(std::vector<int> members) {
  auto child = std::make_shared<MeetingPoint>(shared_from_this(), members);
  const std::scoped_lock lock(mutex_);
  std::erase_if(children_, [](const Child& c) { return c.point.expired(); });
  children_.push_back({child, std::move(members)});
  return child;
}

void MeetingPoint::meet(int rank, std::uint64_t phase) {
  if (failed_.load()) throw_failure(rank, phase);
  const auto arrived = std::chrono::steady_clock::now();
  const auto deadline = arrived + timeout_;
  offer(rank, phase).arrived = arrived;
  ranks_[static_cast<std::size_t>(rank)].phase.store(phase, std::memory_order_release);
  const auto arrivals = arrivals_.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrivals == phase * static_cast<std::uint64_t>(size())) {
    completed_phase_.store(phase, std::memory_order_release);
    { const std::scoped_lock lock(mutex_); }  // no waiter is between its check and its wait
    changed_.notify_all();
    return;
  }
  if (spin(phase)) return;

  std::unique_lock lock(mutex_);
  const auto done = [&] { return completed_phase_.load(std::memory_order_acquire) >= phase; };
  const auto hopeless = [&] { return failed_.load() || !absent_ranks(phase, true).empty(); };
  const bool in_time = changed_.wait_until(lock, deadline, [&] { return done() || hopeless(); });
  lock.unlock();
  std::vector<int> absent;
  while (!done() && !failed_.load()) {
    absent = absent_ranks(phase, in_time);
    if (!absent.empty()) break;
    std::this_thread::yield();  // the last rank has arrived, but has not announced it yet
  }
  if (done()) return;
  if (!failed_.load()) {
    fail(rank, in_time ? Failure{fmt::format("{} left before it", name_ranks(absent)), absent}
                       : explain_timeout(absent, arrived));
  }
  throw_failure(rank, phase);
}

bool MeetingPoint::spin(std::uint64_t phase) const {
  // With more ranks than cores, the awaited rank needs this core, so this one does not spin. The
  // count is cached because looking it up reads a file.
  static const int num_cores = static_cast<int>(std::thread::hardware_concurrency());
  const int spins = size() > num_cores ? 0 : kSpins;
  for (int i = 0; i < spins; ++i) {
    if (completed_phase_.load(std::memory_order_acquire) >= phase) return true;
    if (failed_.load(std::memory_order_relaxed)) return false;
    pause();
  }
  return completed_phase_.load(std::memory_order_acquire) >= phase;
}

std::vector<int> MeetingPoint::absent_ranks(std::uint64_t phase, bool only_left) const {
  std::vector<int> absent;
  for (int r = 0; r < size(); ++r) {
    const Rank& peer = ranks_[static_cast<std::size_t>(r)];
    const bool counts = !only_left || peer.left.load(std::memory_order_acquire);
    if (counts && peer.phase.load(std::memory_order_acquire) < phase) absent.push_back(r);
  }
  return absent;
}

std::pair<std::shared_ptr<MeetingPoint>, int> MeetingPoint::find_waiting(int world_rank,
                                                                         Clock::time_point since) {
  const auto here = std::ranges::find(world_ranks_, world_rank);
  if (here == world_ranks_.end()) return {};
  const auto index = here - world_ranks_.begin();
  const Rank& rank = ranks_[static_cast<std::size_t>(index)];
  std::vector<Child> children;
  bool is_over = rank.left.load();
  {
    const std::scoped_lock lock(mutex_);
    children = children_;
    is_over = is_over || (failure_ && failed_at_ < since);
  }
  if (!is_over && rank.phase.load(std::memory_order_acquire) > completed_phase_.load()) {
    return {shared_from_this(), static_cast<int>(index)};
  }
  for (const Child& child : children) {
    const auto point = child.point.lock();
    if (point == nullptr) continue;
    if (auto found = point->find_waiting(world_rank, since); found.first != nullptr) return found;
  }
  return {};
}

void MeetingPoint::find_culprits(int world_rank, Search& search) {
  const auto [point, rank] = find_waiting(world_rank, search.since);
  if (point == nullptr) {
    search.culprits.insert(world_rank);
    return;
  }
  if (!search.seen.insert(point.get()).second) return;
  std::optional<Failure> failure;
  {
    const std::scoped_lock lock(point->mutex_);
    failure = point->failure_;
  }
  const auto missing =
      failure ? failure->ranks
              : point->absent_ranks(point->ranks_[static_cast<std::size_t>(rank)].phase, false);
  for (const int r : missing) {
    const int world = number_in_world(point->world_ranks_, r);
    if (failure) {
      search.culprits.insert(world);  // the rank that failed there has followed the others
    } else {
      find_culprits(world, search);
    }
  }
}

MeetingPoint::Failure MeetingPoint::explain_timeout(const std::vector<int>& absent,
                                                    Clock::time_point since) {
  auto top = shared_from_this();
  while (const auto parent = top->parent_.lock()) top = parent;
  Search search{.since = since, .seen = {this}, .culprits = {}};
  for (const int r : absent) {
    top->find_culprits(world_ranks_[static_cast<std::size_t>(r)], search);
  }
  const auto& culprits = search.culprits;
  auto reason = fmt::format("{} did not arrive within {}", name_ranks(absent), seconds(timeout_));
  if (culprits.empty()) return {std::move(reason), absent};  // all wait for each other
  std::vector<int> ranks;
  std::vector<int> elsewhere;  // culprits that do not keep this group waiting themselves
  for (const int world : culprits) {
    ranks.push_back(number_in_group(world_ranks_, world));
    if (std::ranges::find(absent, ranks.back()) == absent.end()) elsewhere.push_back(world);
  }
  std::vector<int> waiting;
  std::ranges::copy_if(absent, std::back_inserter(waiting),
                       [&](int r) { return std::ranges::find(ranks, r) == ranks.end(); });
  if (!waiting.empty()) {
    reason += fmt::format("; {} wait{} in another group", name_ranks(waiting),
                          waiting.size() == 1 ? "s" : "");
  }
  if (!elsewhere.empty()) reason += fmt::format(" for {} of the world", name_ranks(elsewhere));
  return {std::move(reason), std::move(ranks)};
}

void MeetingPoint::throw_failure(int rank, std::uint64_t phase) {
  wait_for_readers(rank);
  const Offer& own = offer(rank, phase);
  const std::scoped_lock lock(mutex_);
  throw CommunicationError(fmt::format("{} #{}: {}", own.operation, own.sequence, failure_->reason),
                           failure_->ranks);
}

void MeetingPoint::set_reading(int rank, bool reading) {
  ranks_[static_cast<std::size_t>(rank)].reading.store(reading, std::memory_order_seq_cst);
}

void MeetingPoint::wait_for_readers(int rank) {
  set_reading(rank, false);
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  const auto being_read = [&] {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& r) { return r.reading.load(); });
  };
  while (being_read() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void MeetingPoint::note_first_failure(int origin) {
  int none = -1;
  first_failed_rank_.compare_exchange_strong(none, origin);
  if (const auto parent = parent_.lock()) {
    parent->note_first_failure(members_[static_cast<std::size_t>(origin)]);
  }
}

void MeetingPoint::fail(int origin, Failure failure) {
  note_first_failure(origin);
  std::vector<Child> children;
  {
    const std::scoped_lock lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_at_ = Clock::now();
    failed_.store(true);
    children = children_;
  }
  changed_.notify_all();
  // A rank that failed here will not reach the meetings of split-off groups either.
  for (const Child& child : children) {
    const auto point = child.point.lock();
    if (!point) continue;
    std::vector<int> failed;
    for (std::size_t i = 0; i < child.members.size(); ++i) {
      const auto& ranks = failure.ranks;
      if (std::ranges::find(ranks, child.members[i]) == ranks.end()) continue;
      failed.push_back(static_cast<int>(i));
    }
    if (failed.empty()) continue;
    point->fail(failed.front(), {fmt::format("in the parent group: {}", failure.reason), failed});
  }
}

void MeetingPoint::leave(int rank) {
  ranks_[static_cast<std::size_t>(rank)].left.store(true, std::memory_order_release);
  set_reading(rank, false);
  { const std::scoped_lock lock(mutex_); }
  changed_.notify_all();
}

}  // namespace switchyard::threads
