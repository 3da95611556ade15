// SPDX-License-Identifier: Apache-2.0
// Memory that ranks share, as devices see it: heaps, channels for meetings, and the reason why a
// meeting failed.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>

#include "switchyard/tensor.h"

namespace switchyard {

// Stands for an offset where nothing is lent.
constexpr std::int64_t kNothingLent = std::numeric_limits<std::int64_t>::min();
// The maximum number of host words that a rank brings to a meeting.
constexpr std::size_t kMostMeetWords = 24;

// Why ranks gave up. It is in host memory that all ranks and their devices share, and is initially
// zero. A rank writes its part first and then sets `by`, unless another rank has already set it.
struct PeerFailure {
  static constexpr int kMostRanks = 256;
  enum Kind : std::uint32_t {
    none,
    missing,     // `ranks` did not arrive in time
    other_call,  // `ranks` are in another call
    ended,       // the processes of `ranks` ended
    gave_up,     // the rank itself gave up, for `reason`
  };
  struct Part {
    std::uint32_t kind;
    std::uint32_t operation;  // the Meeting that the rank was in
    std::array<std::uint32_t, kMostRanks / 32> ranks;
    std::uint32_t has_reason;
    std::array<char, 468> reason;  // zero-terminated
  };

  std::uint32_t by;  // 1 + the rank whose part counts; 0 if no rank gave up
  std::array<Part, kMostRanks> parts;
};

// The purpose of a meeting. Ranks that meet for different purposes are in different calls.
enum class Meeting : std::uint32_t { plan = 1, ready, done, close, sums, growth };

// Knows whether a rank has given up.
class PeerCheck {
 public:
  virtual ~PeerCheck() = default;
  // Throws CommunicationError once a rank has given up. Does not wait.
  virtual void check() const = 0;
};

// Where the ranks of a group meet. Pointers are to the device's memory unless a comment says host.
//
// Every rank has a mailbox. It holds a signal from each rank, and two slots of `mail_words` i64
// from each rank, for words and a record. The n-th meeting of a channel uses slot n % 2. A rank
// writes to a slot again only after the meeting in between, and by then the receiver has read it.
// The upper half of a signal is the number of the sender's meeting, the lower half its tag. Meeting
// numbers only grow and are compared by their difference, so that they may wrap around.
struct PeerChannel {
  int rank = 0;
  int num_ranks = 1;
  std::byte* const* heaps = nullptr;              // [ranks], as this rank reaches them
  std::byte* const* mail = nullptr;               // [ranks], as this rank reaches them
  std::span<std::byte* const> mail_on_host = {};  // host: a copy of `mail`
  std::int64_t mail_words = 0;
  std::uint32_t* num_meetings = nullptr;  // meetings of this rank so far
  std::uint32_t* failed = nullptr;        // becomes 1 on this rank when a meeting fails
  PeerFailure* failure = nullptr;         // host
  std::chrono::nanoseconds timeout{0};
  std::weak_ptr<const PeerCheck> check = {};

  // A mailbox has signals for the maximum number of ranks, 8 bytes each, and then the slots.
  static constexpr std::int64_t kSlotsAt = 8 * PeerFailure::kMostRanks;
  static constexpr std::int64_t mail_bytes(int num_ranks, std::int64_t mail_words) {
    return kSlotsAt + 2 * num_ranks * mail_words * 8;
  }
};

// All ranks exchange a few numbers and wait for each other. Afterwards the earlier work of every
// rank's device is done, and its writes are visible to all. A rank that waits longer than the
// channel's timeout gives up for all ranks, and their meetings fail from then on.
struct Meet {
  const PeerChannel& channel;
  Meeting meeting = Meeting::close;
  std::uint32_t detail = 0;  // describes the call; must be equal on all ranks
  // This rank's contribution: at most kMostMeetWords words in host memory, then a record.
  std::span<const std::int64_t> words = {};
  ConstTensorView record = {};  // [m] i64
  TensorView gathered = {};     // out [ranks, words + m] i64 if given; 0 if the meeting fails
  // out [lent, ranks] i64 if given: the first words of each rank, as offsets into its heap, become
  // addresses. Null for kNothingLent and if the meeting fails.
  TensorView addresses = {};
  TensorView cleared = {};  // set to zero if the meeting fails
};

// Returns the lower half of a signal, which must be equal on all ranks of a meeting.
inline std::uint32_t tag_of(const Meet& args) {
  return args.detail << 8 | static_cast<std::uint32_t>(args.meeting);
}

// Memory of one rank's device that other ranks reach. A block returns to the heap with its last
// view, and never to the system: a peer may still access it until the next meeting with this rank.
// For the same reason a newly taken block must not be written before a meeting.
class PeerHeap {
 public:
  virtual ~PeerHeap() = default;
  virtual std::byte* base() const = 0;
  // Returns the size of the address range from base() on, which the heap may grow to.
  virtual std::int64_t reserved_bytes() const = 0;
  virtual TensorView take(const Shape& shape, Dtype dtype) = 0;
  virtual bool holds(const ConstTensorView& view) const = 0;
  virtual std::int64_t bytes_held() const = 0;
};

// A piece that a heap has grown by, for other processes to map.
struct HeapPiece {
  int descriptor = -1;  // owned by the caller
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct PeerHeapOptions {
  std::span<const int> ordinals = {};  // the GPUs of this process that reach the heap
  // Given if ranks are in other processes: called when the heap grows, and returns when they have
  // mapped the piece.
  std::function<void(const HeapPiece&)> announce = nullptr;
};

// The heap of a rank in another process, as this one reaches it.
class ReachedHeap {
 public:
  virtual ~ReachedHeap() = default;
  virtual std::byte* base() const = 0;
  // May be called from any thread. Throws DeviceError if the piece cannot be mapped.
  virtual void map(const HeapPiece& piece) = 0;
};

// Identifies a GPU across processes; zeros for a CPU.
using DeviceIdentity = std::array<std::int64_t, 2>;

}  // namespace switchyard
