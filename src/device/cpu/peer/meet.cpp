// SPDX-License-Identifier: Apache-2.0
// Meetings of ranks in host memory.
#include <algorithm>
#include <atomic>
#include <bit>
#include <thread>
#include <vector>

#include "core/row_bytes.h"
#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic_ref<std::uint64_t> signal_at(std::byte* mail, int source) {
  return std::atomic_ref(reinterpret_cast<std::uint64_t*>(mail)[source]);
}

// One rank's part of a meeting.
class Visit {
 public:
  explicit Visit(const Meet& args)
      : args_(args),
        channel_(args.channel),
        number_(*channel_.num_meetings + 1),
        failed_by_(channel_.failure->by) {}

  bool has_failed() const { return failed_by_.load(std::memory_order_acquire) != 0; }

  void publish() const {
    for (int r = 0; r < channel_.num_ranks; ++r) {
      std::int64_t* const slot = slot_of(r, channel_.rank);
      std::ranges::copy(args_.words, slot);
      if (const auto record = record_words(); record > 0) {
        std::copy_n(args_.record.span<std::int64_t>().data(), record, slot + args_.words.size());
      }
      signal_at(channel_.mail[r], channel_.rank)
          .store(std::uint64_t{number_} << 32 | tag_of(args_), std::memory_order_release);
    }
  }

  // Returns true once all ranks have arrived for the same call. Returns false on a failure.
  bool wait() const {
    const auto deadline = Clock::now() + channel_.timeout;
    for (int spins = 0; !absent_ranks().empty(); ++spins) {
      if (has_failed()) return false;
      if (Clock::now() > deadline) return give_up(PeerFailure::missing, absent_ranks());
      if (spins < 1000) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    const auto elsewhere = ranks_that([&](std::uint64_t signal) {
      const bool is_here = static_cast<std::uint32_t>(signal >> 32) == number_;
      return is_here && static_cast<std::uint32_t>(signal) != tag_of(args_);
    });
    return elsewhere.empty() || give_up(PeerFailure::other_call, elsewhere);
  }

  void collect() const {
    const auto words = static_cast<std::int64_t>(args_.words.size()) + record_words();
    for (int r = 0; r < channel_.num_ranks; ++r) {
      if (is_wanted(args_.gathered)) {
        std::copy_n(own_slot(r), words, args_.gathered.slice(r, r + 1).span<std::int64_t>().data());
      }
      for (std::int64_t i = 0; is_wanted(args_.addresses) && i < args_.addresses.rows(); ++i) {
        const std::int64_t offset = own_slot(r)[i];
        args_.addresses.slice(i, i + 1).span<std::int64_t>()[static_cast<std::size_t>(r)] =
            offset == kNothingLent ? 0 : std::bit_cast<std::int64_t>(channel_.heaps[r]) + offset;
      }
    }
  }

  void fail() const {
    *channel_.failed = 1;
    for (const TensorView& view : {args_.gathered, args_.addresses, args_.cleared}) {
      if (is_wanted(view)) zero_rows(view);
    }
  }

  void end() const { *channel_.num_meetings = number_; }

 private:
  static bool is_wanted(const TensorView& view) { return view.data() != nullptr; }
  std::int64_t record_words() const {
    return args_.record.data() != nullptr ? args_.record.rows() : 0;
  }
  std::int64_t* slot_of(int at, int source) const {
    const std::int64_t slot = (number_ % 2) * channel_.num_ranks + source;
    auto* const slots = channel_.mail[at] + PeerChannel::kSlotsAt;
    return reinterpret_cast<std::int64_t*>(slots) + slot * channel_.mail_words;
  }
  const std::int64_t* own_slot(int source) const { return slot_of(channel_.rank, source); }

  template <typename Is>
  std::vector<int> ranks_that(Is is) const {
    std::vector<int> found;
    for (int r = 0; r < channel_.num_ranks; ++r) {
      if (is(signal_at(channel_.mail[channel_.rank], r).load(std::memory_order_acquire))) {
        found.push_back(r);
      }
    }
    return found;
  }
  std::vector<int> absent_ranks() const {
    return ranks_that([&](std::uint64_t signal) {
      return static_cast<std::int32_t>(static_cast<std::uint32_t>(signal >> 32) - number_) < 0;
    });
  }

  bool give_up(PeerFailure::Kind kind, const std::vector<int>& ranks) const {
    if (has_failed()) return false;
    auto& part = channel_.failure->parts[static_cast<std::size_t>(channel_.rank)];
    part.kind = kind;
    part.operation = static_cast<std::uint32_t>(args_.meeting);
    for (const int r : ranks) part.ranks[static_cast<std::size_t>(r / 32)] |= 1U << (r % 32);
    std::uint32_t nobody = 0;
    failed_by_.compare_exchange_strong(nobody, static_cast<std::uint32_t>(channel_.rank) + 1);
    return false;
  }

  const Meet& args_;
  const PeerChannel& channel_;
  std::uint32_t number_;
  std::atomic_ref<std::uint32_t> failed_by_;
};

}  // namespace

void meet(const Meet& args) {
  const Visit visit(args);
  bool has_met = !visit.has_failed();
  if (has_met) {
    visit.publish();
    has_met = visit.wait();
  }
  if (has_met) {
    visit.collect();
  } else {
    visit.fail();
  }
  visit.end();
}

}  // namespace switchyard::cpu
