// SPDX-License-Identifier: Apache-2.0
// A page shared by the ranks of one host: who has entered which phase, who gave up, who is alive.
// MPI reports none of this, and without it a dead peer causes a hang.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/process_watch.h"
#include "core/shared_pages.h"

namespace switchyard::mpi {

// The data that every rank sends to the others when a communicator is made.
struct Hello {
  std::int64_t pid = 0;
  std::uint64_t host = 0;  // equal if ranks see each other's processes and shared memory
};
Hello make_hello();

class Board {
 public:
  // A problem with peers that keeps this rank from completing a phase.
  struct Trouble {
    std::vector<int> ranks;
    std::string reason;       // empty: no trouble
    bool is_relayed = false;  // worded by another rank; already names its call
    bool is_death = false;    // the process of ranks[0] has ended
  };

  Board(int rank, std::span<const Hello> hellos);
  // The first rank of a host creates the page. The page has no name: the others open it through
  // /proc, and the kernel frees it with its last user, however the ranks end. Collective setup:
  // create() everywhere, an all-gather of its results, open() everywhere, a barrier, close()
  // everywhere.
  std::int64_t create();
  void open(std::span<const std::int64_t> created);
  void close();
  bool is_open() const { return entries_ != nullptr; }

  // Records that this rank enters a phase of a collective that moves units of `unit_bytes` bytes.
  void enter(std::uint64_t phase, std::string_view call, std::int64_t unit_bytes);
  void complete(std::uint64_t phase);
  // Adds to waits [size] how much later than this rank each peer entered the phase, which is
  // complete here. Skips peers on other hosts, peers that have not entered yet (as a broadcast
  // allows), and peers whose record has been overwritten by a later phase.
  void add_waits(std::uint64_t phase, std::span<std::chrono::nanoseconds> waits) const;
  void beat();
  // `culprits` are the ranks at fault, so that peers can name them; empty if not known.
  void give_up(std::string_view reason, std::span<const int> culprits);
  void leave();

  // Finds a peer that entered this phase with a different call or size, or gave up before
  // completing it. MPI may complete the phase here all the same.
  Trouble find_breach(std::uint64_t phase) const;
  // Like find_breach(), but also finds a peer that has left or died, so that the phase cannot end.
  Trouble find_trouble(std::uint64_t phase) const;
  // True if every visible peer has entered the phase.
  bool has_all(std::uint64_t phase) const;
  // Returns the peers to name at the deadline: those that have not entered the phase, unless they
  // wait in an earlier one, and those that show no sign of life.
  std::vector<int> find_missing(std::uint64_t phase) const;
  // Returns the peers that cannot be seen: they are on other hosts.
  std::vector<int> find_unseen() const;

 private:
  using Clock = std::chrono::steady_clock;  // shared by all processes of a host
  enum class State : std::uint32_t { unknown, joined, gave_up, left };
  struct Call {
    std::atomic<std::uint64_t> phase;
    std::atomic<std::int64_t> unit_bytes;
    std::atomic<Clock::time_point> arrived;
    std::array<char, 48> name;
  };
  struct alignas(64) Entry {
    std::atomic<State> state;
    std::atomic<std::uint64_t> entered;
    std::atomic<std::uint64_t> completed;
    std::atomic<Clock::time_point> last_beat;
    std::array<Call, 8> calls;
    std::array<char, 512> reason;
    std::array<std::int32_t, 16> culprits;  // at most the first 16
    std::int32_t num_culprits;
  };

  struct CallText {
    std::string name;
    std::int64_t unit_bytes = 0;
    bool operator==(const CallText&) const = default;
  };

  bool is_creator() const { return creator_ == rank_; }
  const Entry* peer(int rank) const;
  bool has_died(int rank) const;
  std::int64_t page_bytes() const;
  Trouble trouble_of(int rank, const Entry& entry) const;
  std::vector<int> culprits_of_breach(std::uint64_t phase, const CallText& own) const;
  static std::optional<CallText> read_call(const Entry& entry, std::uint64_t phase);
  static std::optional<Clock::time_point> read_arrival(const Entry& entry, std::uint64_t phase);

  int rank_;
  std::vector<Hello> hellos_;
  int creator_ = 0;
  std::vector<std::shared_ptr<const ProcessWatch>> watches_;  // null for other hosts and this rank
  std::optional<SharedPages> pages_;
  Entry* entries_ = nullptr;
};

}  // namespace switchyard::mpi
