// Memory that ranks write to each other, as devices see it: heaps, places to meet, and why a
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

// In place of an offset: nothing is lent.
constexpr std::int64_t kNothingLent = std::numeric_limits<std::int64_t>::min();
// Numbers of the host that a rank brings to a meeting.
constexpr std::size_t kMostMeetWords = 24;

// Why ranks gave up: in memory of the host that all ranks and their devices share, zeros to begin
// with. A rank writes its part first and then names itself, unless another has done so.
struct PeerFailure {
  static constexpr int kMostRanks = 256;
  enum Kind : std::uint32_t {
    none,
    missing,     // `ranks` did not arrive in time
    other_call,  // `ranks` are in another call
    ended,       // the processes of `ranks` did
    gave_up,     // the rank itself did, for `reason`
  };
  struct Part {
    std::uint32_t kind;
    std::uint32_t operation;  // that it was in: a Meeting
    std::array<std::uint32_t, kMostRanks / 32> ranks;
    std::uint32_t has_reason;
    std::array<char, 468> reason;  // ends with 0
  };

  std::uint32_t by;  // 1 + the rank whose part counts; 0: nobody gave up
  std::array<Part, kMostRanks> parts;
};

// What ranks meet for. Those that meet for different things are in different calls.
enum class Meeting : std::uint32_t { plan = 1, ready, done, close, sums, growth };

// Who knows whether a rank has given up.
class PeerCheck {
 public:
  virtual ~PeerCheck() = default;
  // Throws CommunicationError once a rank has. Does not wait.
  virtual void check() const = 0;
};

// Where the ranks of a group meet. Pointers are of the device's memory, unless a comment says host.
//
// Every rank has mail: a signal from each rank, and two slots of `mail_words` i64 from each, for
// words and a record. The n-th meeting of a channel uses slot n % 2: a rank that writes to it again
// has met this one in between, which so is done with what was there. A signal is the number of the
// sender's meeting, whose numbers only grow and are compared by their difference, above its tag.
struct PeerChannel {
  int rank = 0;
  int num_ranks = 1;
  std::byte* const* heaps = nullptr;              // [ranks], as this rank reaches them
  std::byte* const* mail = nullptr;               // [ranks], likewise
  std::span<std::byte* const> mail_on_host = {};  // host: the same
  std::int64_t mail_words = 0;
  std::uint32_t* num_meetings = nullptr;  // of this rank so far
  std::uint32_t* failed = nullptr;        // becomes 1 on this rank when a meeting fails
  PeerFailure* failure = nullptr;         // host
  std::chrono::nanoseconds timeout{0};
  std::weak_ptr<const PeerCheck> check = {};

  // A rank's mail: the signals of all ranks there can be, 8 bytes each, then the slots.
  static constexpr std::int64_t kSlotsAt = 8 * PeerFailure::kMostRanks;
  static constexpr std::int64_t mail_bytes(int num_ranks, std::int64_t mail_words) {
    return kSlotsAt + 2 * num_ranks * mail_words * 8;
  }
};

// All ranks tell each other a few numbers, and wait until everybody has: what a rank's device was
// given before is then done, and its writes are there for all. One that waits longer than the
// channel's timeout gives up for all ranks, whose meetings fail from then on.
struct Meet {
  const PeerChannel& channel;
  Meeting meeting = Meeting::close;
  std::uint32_t detail = 0;  // of the call, alike on all ranks
  // This rank's: host words, at most kMostMeetWords, then a record.
  std::span<const std::int64_t> words = {};
  ConstTensorView record = {};  // [m] i64
  TensorView gathered = {};     // out [ranks, words + m] i64, if wanted; zeros where it failed
  // out [lent, ranks] i64, if wanted: the first words as offsets in their ranks' heaps become
  // addresses; null for kNothingLent, and where the meeting failed.
  TensorView addresses = {};
  TensorView cleared = {};  // becomes zero where the meeting failed
};

// What all ranks of a meeting must have alike, below the number in a signal.
inline std::uint32_t tag_of(const Meet& args) {
  return args.detail << 8 | static_cast<std::uint32_t>(args.meeting);
}

// Memory of one rank's device that other ranks reach. What is taken goes back to the heap when the
// last view of it is gone, and to nobody else: a peer may still be at it, until this rank has met
// it once more. So what is taken is written only after a meeting.
class PeerHeap {
 public:
  virtual ~PeerHeap() = default;
  virtual std::byte* base() const = 0;
  // What lies behind the base, now or once it has grown.
  virtual std::int64_t reserved_bytes() const = 0;
  virtual TensorView take(const Shape& shape, Dtype dtype) = 0;
  virtual bool holds(const ConstTensorView& view) const = 0;
  virtual std::int64_t bytes_held() const = 0;
};

// Memory that a heap has grown by, for other processes to map.
struct HeapPiece {
  int descriptor = -1;  // of the one who calls
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct PeerHeapOptions {
  std::span<const int> ordinals = {};  // the GPUs of this process that reach the heap
  // For ranks in other processes, if given: called as the heap grows, and returns when they have
  // mapped the piece.
  std::function<void(const HeapPiece&)> announce = nullptr;
};

// The heap of a rank in another process, as this one reaches it.
class ReachedHeap {
 public:
  virtual ~ReachedHeap() = default;
  virtual std::byte* base() const = 0;
  // May be called from any thread. Throws DeviceError.
  virtual void map(const HeapPiece& piece) = 0;
};

// Tells GPUs apart, in whatever process; zeros for a CPU.
using DeviceIdentity = std::array<std::int64_t, 2>;

}  // namespace switchyard
