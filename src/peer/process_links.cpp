// SPDX-License-Identifier: Apache-2.0
#include "peer/process_links.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>

#include "core/require.h"
#include "core/without_signals.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

struct Message {
  enum Kind : std::int64_t {
    piece,   // a new piece of the sender's heap; its descriptor comes along
    mapped,  // the piece is mapped, unless `error` is set
    goodbye,
  };
  Kind kind = goodbye;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
  std::array<char, 232> error{};  // null-terminated

  std::span<const std::byte> as_bytes() const { return std::as_bytes(std::span(this, 1)); }
};

}  // namespace

ProcessLinks::ProcessLinks(int rank, std::vector<LocalConnection> connections,
                           std::vector<std::shared_ptr<ReachedHeap>> heaps,
                           std::shared_ptr<GroupFailure> failure, std::chrono::nanoseconds timeout)
    : rank_(rank),
      failure_(std::move(failure)),
      timeout_(timeout),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  require<DeviceError>(stop_.is_open(), "making an event for the links between processes");
  for (std::size_t r = 0; r < connections.size(); ++r) {
    peers_.push_back({.connection = std::move(connections[r]), .heap = std::move(heaps[r])});
  }
  const WithoutSignals without_signals;
  thread_ = std::thread([this] { listen(); });
}

// Stops listening before it says goodbye: connections that peers close meanwhile are no failures.
ProcessLinks::~ProcessLinks() {
  const std::uint64_t once = 1;
  while (::write(stop_.get(), &once, sizeof(once)) < 0 && errno == EINTR) {
  }
  thread_.join();
  for (const Peer& peer : peers_) {
    if (peer.connection.is_open()) peer.connection.send(Message{}.as_bytes(), -1, Clock::now());
  }
}

void ProcessLinks::announce(const HeapPiece& piece) {
  const auto deadline = Clock::now() + timeout_;
  std::unique_lock lock(mutex_);
  ++num_announced_;
  const auto present = ranks_that_wait();
  lock.unlock();  // the thread must keep reading, or peers could not send
  const Message message{.kind = Message::piece, .offset = piece.offset, .bytes = piece.bytes};
  for (const int r : present) {
    const auto& connection = peers_[static_cast<std::size_t>(r)].connection;
    connection.send(message.as_bytes(), piece.descriptor, deadline);
  }
  lock.lock();
  while (!ranks_that_wait().empty() && !failure_->has_failed() && Clock::now() < deadline) {
    changed_.wait_for(lock, std::chrono::milliseconds(10));  // polls: devices do not notify
  }
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].error.empty()) continue;
    const auto what = fmt::format("rank {} cannot map {} bytes of the memory of rank {}: {}", r,
                                  piece.bytes, rank_, peers_[r].error);
    failure_->give_up(rank_, what);
    throw DeviceError(what);
  }
  const auto waiting = ranks_that_wait();
  if (waiting.empty()) return;
  lock.unlock();
  failure_->blame(rank_, PeerFailure::missing, Meeting::growth, waiting);
  const auto explained = failure_->explain(timeout_);
  throw CommunicationError(explained.what, explained.ranks);
}

std::vector<int> ProcessLinks::ranks_that_wait() const {
  std::vector<int> waiting;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    const Peer& peer = peers_[r];
    if (!peer.connection.is_open() || peer.is_gone || peer.num_mapped >= num_announced_) continue;
    waiting.push_back(static_cast<int>(r));
  }
  return waiting;
}

void ProcessLinks::listen() {
  while (true) {
    std::vector<pollfd> wanted{{.fd = stop_.get(), .events = POLLIN, .revents = 0}};
    std::vector<int> ranks{-1};
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (!peers_[r].connection.is_open() || peers_[r].is_gone) continue;
      wanted.push_back({.fd = peers_[r].connection.socket(), .events = POLLIN, .revents = 0});
      ranks.push_back(static_cast<int>(r));
    }
    if (::poll(wanted.data(), wanted.size(), -1) < 0 && errno != EINTR) return;
    if (wanted[0].revents != 0) return;
    for (std::size_t i = 1; i < wanted.size(); ++i) {
      if (wanted[i].revents != 0) receive_from(ranks[i]);
    }
  }
}

void ProcessLinks::receive_from(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Message message;
  Descriptor descriptor;
  const auto received = peer.connection.receive(std::as_writable_bytes(std::span(&message, 1)),
                                                descriptor, std::chrono::steady_clock::now());
  if (received == Received::nothing) return;
  if (received == Received::message && message.kind == Message::piece) {
    return map(peer, {descriptor.get(), message.offset, message.bytes});
  }
  if (received == Received::end) {
    failure_->blame(rank_, PeerFailure::ended, Meeting::growth, {&rank, 1});
  }
  {
    const std::scoped_lock lock(mutex_);
    if (received == Received::message && message.kind == Message::mapped) {
      ++peer.num_mapped;
      peer.error = message.error.data();
    } else {
      peer.is_gone = true;
    }
  }
  changed_.notify_all();
}

void ProcessLinks::map(Peer& peer, const HeapPiece& piece) const {
  Message answer{.kind = Message::mapped};
  try {
    peer.heap->map(piece);
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    std::copy_n(what.data(), std::min(what.size(), answer.error.size() - 1), answer.error.data());
  }
  peer.connection.send(answer.as_bytes(), -1, Clock::now() + timeout_);
}

}  // namespace switchyard
