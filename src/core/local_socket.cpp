// SPDX-License-Identifier: Apache-2.0
#include "core/local_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "core/last_error.h"
#include "core/require.h"

namespace switchyard {
namespace {

struct Address {
  sockaddr_un value{};
  socklen_t size = 0;

  // A name that begins with a zero byte is abstract: it has no entry in the file system.
  explicit Address(const LocalListener::Name& name) {
    const auto text = fmt::format("switchyard-{:016x}{:016x}", static_cast<std::uint64_t>(name[0]),
                                  static_cast<std::uint64_t>(name[1]));
    value.sun_family = AF_UNIX;
    std::ranges::copy(text, value.sun_path + 1);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }
};

Descriptor make_socket(int type = SOCK_SEQPACKET) {
  Descriptor made(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  require<Unsupported>(made.is_open(), "making a local socket: {}", last_error());
  return made;
}

// Waits until the socket is readable. Returns false on a timeout or an error.
bool wait_for(int socket, Deadline deadline) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd wanted{.fd = socket, .events = POLLIN, .revents = 0};
    const int found =
        ::poll(&wanted, 1, static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1000)));
    if (found > 0) return true;
    if (found < 0 && errno != EINTR) return false;
    if (left.count() <= 0) return false;
  }
}

bool is_of_this_user(int socket) {
  ucred other{};
  socklen_t size = sizeof(other);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.uid == ::geteuid();
}

constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(int));

}  // namespace

bool LocalConnection::send(std::span<const std::byte> message, int descriptor,
                           Deadline deadline) const {
  iovec part{.iov_base = const_cast<std::byte*>(message.data()), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  if (descriptor >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof(int));
  }
  while (true) {
    const ssize_t sent = ::sendmsg(socket(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return sent == static_cast<ssize_t>(message.size());
    if (errno == EINTR) continue;
    // The queue is full or too many descriptors are in flight. Receivers drain both soon.
    const bool may_fit_later = errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS;
    if (!may_fit_later || std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Received LocalConnection::receive(std::span<std::byte> message, Descriptor& descriptor,
                                  Deadline deadline) const {
  if (!wait_for(socket(), deadline)) return Received::nothing;
  iovec part{.iov_base = message.data(), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  // A peer that closes with unread messages resets the connection. The reset is reported once,
  // before the last messages that the peer sent.
  ssize_t got = 0;
  bool was_reset = false;
  do {
    got = ::recvmsg(socket(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(was_reset, true))));
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Received::nothing;
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights != nullptr;
       rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    int number = -1;
    std::memcpy(&number, CMSG_DATA(rights), sizeof(int));
    descriptor = Descriptor(number);
  }
  return got == static_cast<ssize_t>(message.size()) ? Received::message : Received::end;
}

LocalListener::LocalListener() : socket_(make_socket()) {
  std::random_device random;
  for (std::int64_t& word : name_) {
    word = static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random());
  }
  const Address address(name_);
  require<Unsupported>(::bind(socket_.get(), address.get(), address.size) == 0 &&
                           ::listen(socket_.get(), SOMAXCONN) == 0,
                       "listening on a local socket: {}", last_error());
}

LocalConnection LocalListener::accept(Deadline deadline) const {
  while (wait_for(socket_.get(), deadline)) {
    Descriptor made(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const bool may_work_later =
        made.is_open() || errno == EINTR || errno == EAGAIN || errno == ECONNABORTED;
    require<Unsupported>(may_work_later, "accepting a connection on a local socket: {}",
                         last_error());
    if (made.is_open() && is_of_this_user(made.get())) return LocalConnection(std::move(made));
  }
  return {};
}

LocalConnection connect_to(const LocalListener::Name& name) {
  Descriptor made = make_socket();
  const Address address(name);
  require<Unsupported>(
      ::connect(made.get(), address.get(), address.size) == 0,
      "cannot connect to a local socket ({}): ranks in containers must share a network namespace",
      last_error());
  return LocalConnection(std::move(made));
}

LocalMailbox::LocalMailbox(const Name& name) : socket_(make_socket(SOCK_DGRAM)) {
  const Address address(name);
  const int with_senders = 1;
  require<Unsupported>(::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &with_senders,
                                    sizeof(with_senders)) == 0 &&
                           ::bind(socket_.get(), address.get(), address.size) == 0,
                       "receiving messages on a local socket: {}", last_error());
}

bool LocalMailbox::send(const Name& to, std::span<const std::byte> message) const {
  const Address address(to);
  return ::sendto(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                  address.get(), address.size) == static_cast<ssize_t>(message.size());
}

std::optional<LocalMailbox::Sender> LocalMailbox::receive(std::span<std::byte> message) const {
  iovec part{.iov_base = message.data(), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(ucred))> control{};
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_TRUNC);
  const cmsghdr* const about = got < 0 ? nullptr : CMSG_FIRSTHDR(&header);
  if (got != static_cast<ssize_t>(message.size()) || about == nullptr ||
      about->cmsg_type != SCM_CREDENTIALS) {
    return std::nullopt;
  }
  ucred sender{};
  std::memcpy(&sender, CMSG_DATA(about), sizeof(sender));
  return sender.uid == ::geteuid() ? std::optional(Sender{sender.pid}) : std::nullopt;
}

}  // namespace switchyard
