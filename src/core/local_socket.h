// SPDX-License-Identifier: Apache-2.0
// Unix sockets between processes of one host, for small messages and file descriptors. Their names
// are abstract, so no file is left behind.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/descriptor.h"

namespace switchyard {

using Deadline = std::chrono::steady_clock::time_point;

enum class Received { message, nothing, end };

class LocalConnection {
 public:
  LocalConnection() = default;
  explicit LocalConnection(Descriptor socket) : socket_(std::move(socket)) {}

  int socket() const { return socket_.get(); }
  bool is_open() const { return socket_.is_open(); }

  // Sends one whole message, with a copy of `descriptor` unless it is negative. Returns false if
  // the peer is gone or accepts nothing before the deadline.
  bool send(std::span<const std::byte> message, int descriptor, Deadline deadline) const;
  // Waits until the deadline for a message of this size. `descriptor` is set if one comes with it.
  // Reports a message of any other size as `Received::end`.
  Received receive(std::span<std::byte> message, Descriptor& descriptor, Deadline deadline) const;

 private:
  Descriptor socket_;
};

// Accepts connections from other processes of the same user.
class LocalListener {
 public:
  using Name = std::array<std::int64_t, 2>;

  LocalListener();
  const Name& name() const { return name_; }
  // Returns a connection that is not open if nobody connects before the deadline. Throws
  // Unsupported if the socket cannot accept connections.
  LocalConnection accept(Deadline deadline) const;

 private:
  Name name_;
  Descriptor socket_;
};

// Connects to a listener. Throws Unsupported if it cannot be reached.
LocalConnection connect_to(const LocalListener::Name& name);

// Sends short datagrams to, and receives them from, other processes of the same user.
class LocalMailbox {
 public:
  using Name = LocalListener::Name;

  explicit LocalMailbox(const Name& name);
  // Does not block. Returns false if no mailbox has this name or if it is full.
  bool send(const Name& to, std::span<const std::byte> message) const;
  struct Sender {
    std::int64_t pid = 0;
  };
  // Does not block. Returns nullopt if there is no message. A message that has another size or
  // comes from another user is discarded and also gives nullopt.
  std::optional<Sender> receive(std::span<std::byte> message) const;

 private:
  Descriptor socket_;
};

}  // namespace switchyard
