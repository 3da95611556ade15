// SPDX-License-Identifier: Apache-2.0
// Collectives between threads. Small payloads are copied into the offer and cost one meeting; large
// ones are read directly from the peer's memory between two meetings.
#include "comm/threads/thread_communicator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "comm/find_minority.h"
#include "core/require.h"

namespace switchyard::threads {
namespace {

constexpr std::int64_t kCopyBytes = 128 * 1024;

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

std::int64_t sum_before(std::span<const std::int64_t> rows, int rank) {
  return std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0});
}

}  // namespace

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<MeetingPoint> point, int rank)
    : Communicator(rank, point->size(), point->timeout()), point_(std::move(point)) {}

ThreadCommunicator::~ThreadCommunicator() {
  give_up_if_unwinding();
  point_->leave(rank());
}

Offer& ThreadCommunicator::prepare(std::int64_t unit_bytes) {
  ++phase_;
  Offer& own = point_->offer(rank(), phase_);
  own.operation = operation();
  own.detail = detail();
  own.sequence = sequence();
  own.unit_bytes = unit_bytes;
  own.data = nullptr;
  own.rows = {};
  own.views.clear();
  own.child = nullptr;
  return own;
}

void ThreadCommunicator::meet() {
  point_->meet(rank(), phase_);
  require_same_call();
  add_waits();
}

void ThreadCommunicator::add_waits() {
  const auto arrived = offer_of(rank()).arrived;
  const auto own = waits();
  for (int r = 0; r < size(); ++r) {
    own[static_cast<std::size_t>(r)] +=
        std::max(offer_of(r).arrived - arrived, std::chrono::steady_clock::duration::zero());
  }
}

void ThreadCommunicator::blame(int rank, const std::string& what) const {
  throw CommunicationError(fmt::format("{}: rank {} {}", current_call(), rank, what), {rank});
}

void ThreadCommunicator::require_same_call() {
  const Offer& own = offer_of(rank());
  const auto is_same = [&](const Offer& peer) {
    return peer.operation == own.operation && peer.sequence == own.sequence &&
           peer.detail == own.detail && peer.unit_bytes == own.unit_bytes;
  };
  int r = 0;  // the first rank that differs
  while (r < size() && is_same(offer_of(r))) ++r;
  if (r == size()) return;
  std::vector<int> alike;
  std::vector<int> others;
  for (int i = 0; i < size(); ++i) (is_same(offer_of(i)) ? alike : others).push_back(i);
  const Offer& peer = offer_of(r);
  const bool is_other_size =
      peer.operation == own.operation && peer.sequence == own.sequence && peer.detail == own.detail;
  throw CommunicationError(
      fmt::format("{}: rank {} {}", current_call(), r,
                  is_other_size
                      ? fmt::format("passed {} bytes, but rank {} passed {}", peer.unit_bytes,
                                    rank(), own.unit_bytes)
                      : fmt::format("called {} #{}{} instead; all ranks must make the same calls "
                                    "in the same order",
                                    peer.operation, peer.sequence,
                                    peer.detail.empty() ? "" : fmt::format(" ({})", peer.detail))),
      find_minority(std::move(alike), std::move(others)));
}

template <typename Read>
void ThreadCommunicator::meet_and_read(Read read) {
  point_->set_reading(rank(), true);
  const auto unit_bytes = offer_of(rank()).unit_bytes;
  try {
    meet();
    read();
  } catch (...) {
    point_->wait_for_readers(rank());
    throw;
  }
  point_->set_reading(rank(), false);
  prepare(unit_bytes);
  meet();
}

void ThreadCommunicator::do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) {
  Offer& own = prepare(row_bytes);
  own.data = send.data;
  own.rows = send.rows;
  meet_and_read([&] {
    std::byte* to = recv.data;
    for (int source = 0; source < size(); ++source) {
      const Offer& peer = offer_of(source);
      const auto sent = peer.rows[static_cast<std::size_t>(rank())];
      const auto expected = recv.rows[static_cast<std::size_t>(source)];
      if (sent != expected) {
        blame(source,
              fmt::format("sends {} rows to rank {}, which expects {}", sent, rank(), expected));
      }
      copy_bytes(to, peer.data + sum_before(peer.rows, rank()) * row_bytes, sent * row_bytes);
      to += sent * row_bytes;
    }
  });
}

void ThreadCommunicator::do_all_gather(const Bytes& send, const Bytes& recv) {
  Offer& own = prepare(send.bytes);
  if (send.bytes <= kCopyBytes) {
    own.copy.assign(send.data, send.data + send.bytes);
    meet();
    for (int r = 0; r < size(); ++r) {
      copy_bytes(recv.data + r * send.bytes, offer_of(r).copy.data(), send.bytes);
    }
    return;
  }
  own.data = send.data;
  meet_and_read([&] {
    for (int r = 0; r < size(); ++r) {
      copy_bytes(recv.data + r * send.bytes, offer_of(r).data, send.bytes);
    }
  });
}

void ThreadCommunicator::do_broadcast(const Bytes& values, int root) {
  Offer& own = prepare(values.bytes);
  own.data = values.data;
  meet_and_read([&] {
    if (rank() != root) copy_bytes(values.data, offer_of(root).data, values.bytes);
  });
}

void ThreadCommunicator::do_barrier() {
  prepare(0);
  meet();
}

std::unique_ptr<Communicator> ThreadCommunicator::do_split(int color, int key) {
  prepare(0).words = {color, key};
  meet();
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (offer_of(r).words[0] == color) members.push_back(r);
  }
  std::ranges::stable_sort(members, {}, [&](int r) { return offer_of(r).words[1]; });
  const int leader = members.front();

  Offer& own = prepare(0);
  if (color >= 0 && leader == rank()) own.child = point_->make_child(members);
  meet();
  if (color < 0) return nullptr;
  const auto position = std::ranges::find(members, rank()) - members.begin();
  return std::make_unique<ThreadCommunicator>(offer_of(leader).child, static_cast<int>(position));
}

std::vector<std::vector<TensorView>> ThreadCommunicator::map(std::span<const TensorView> views) {
  std::vector<std::vector<TensorView>> all;
  run_collective("map", "", [&] {
    prepare(static_cast<std::int64_t>(views.size())).views.assign(views.begin(), views.end());
    point_->set_reading(rank(), true);
    meet();
    for (int r = 0; r < size(); ++r) all.push_back(offer_of(r).views);
  });
  return all;
}

void ThreadCommunicator::phase_barrier() {
  run_collective("phase_barrier", "", [&] {
    point_->set_reading(rank(), false);
    prepare(0);
    meet();
    point_->offer(rank(), phase_ - 1).views.clear();  // ends the loan of map()
  });
}

void ThreadCommunicator::do_abort(const std::string& reason, const std::vector<int>& culprits) {
  const bool is_own_fault = culprits == std::vector{rank()};
  point_->fail(rank(), {is_own_fault ? fmt::format("rank {} gave up: {}", rank(), reason) : reason,
                        culprits});
  point_->wait_for_readers(rank());  // they may read memory that this rank has lent
}

}  // namespace switchyard::threads
