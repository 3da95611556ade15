// Connections between processes of one host, which carry small messages and descriptors of files.
// Their names are in no folder, so nothing is left behind.
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

  // Whole messages, with a copy of a descriptor if there is one. Returns false where the other
  // process is gone, or takes no more until the deadline.
  bool send(std::span<const std::byte> message, int descriptor, Deadline deadline) const;
  // Waits until the deadline for a message of this size. What has another size is the end of it.
  Received receive(std::span<std::byte> message, Descriptor& descriptor, Deadline deadline) const;

 private:
  Descriptor socket_;
};

// Where other processes of the same user connect to this one.
class LocalListener {
 public:
  using Name = std::array<std::int64_t, 2>;

  LocalListener();
  const Name& name() const { return name_; }
  // Not open if nobody came until the deadline. Throws Unsupported where no connection can be made.
  LocalConnection accept(Deadline deadline) const;

 private:
  Name name_;
  Descriptor socket_;
};

// Throws Unsupported where the listener cannot be reached.
LocalConnection connect_to(const LocalListener::Name& name);

// Takes short messages from other processes of the same user, without a connection.
class LocalMailbox {
 public:
  using Name = LocalListener::Name;

  explicit LocalMailbox(const Name& name);
  // Returns at once; false where nobody has a mailbox of this name, or it is full.
  bool send(const Name& to, std::span<const std::byte> message) const;
  struct Sender {
    std::int64_t pid = 0;
  };
  // Returns at once. Nothing if there is no message, or one of another size.
  std::optional<Sender> receive(std::span<std::byte> message) const;

 private:
  Descriptor socket_;
};

}  // namespace switchyard
