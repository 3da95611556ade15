// SPDX-License-Identifier: Apache-2.0
#include "peer/group_failure.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/require.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;

std::string_view name_of(std::uint32_t meeting) {
  switch (static_cast<Meeting>(meeting)) {
    case Meeting::plan:
      return "the exchange of a plan's records";
    case Meeting::ready:
      return "the beginning of a movement";
    case Meeting::done:
      return "the end of a movement";
    case Meeting::close:
      return "the copy of rows at the end of a movement";
    case Meeting::sums:
      return "the exchange of a batch's sums";
    case Meeting::growth:
      return "the mapping of a heap that has grown";
  }
  return "a meeting";
}

// Where a Part that gave up has no meeting: its `ranks` are numbers in the job.
constexpr std::uint32_t kNamesWorldRanks = 1U << 31;  // no Meeting

void set_rank(PeerFailure::Part& part, int rank) {
  part.ranks[static_cast<std::size_t>(rank / 32)] |= 1U << (rank % 32);
}

std::vector<int> ranks_of(const PeerFailure::Part& part) {
  std::vector<int> ranks;
  for (int r = 0; r < PeerFailure::kMostRanks; ++r) {
    if ((part.ranks[static_cast<std::size_t>(r / 32)] >> (r % 32) & 1U) != 0) ranks.push_back(r);
  }
  return ranks;
}

void write_reason(PeerFailure::Part& part, std::string_view reason) {
  if (reason.empty()) return;
  const auto size = std::min(reason.size(), part.reason.size() - 1);
  std::copy_n(reason.data(), size, part.reason.data());
  std::atomic_ref(part.has_reason).store(1, std::memory_order_release);
}

// A rank that an exception unwinds gives up before its reason is known. Waits briefly until whoever
// catches the exception writes the reason.
std::string reason_of(PeerFailure::Part& part) {
  constexpr auto kLittle = std::chrono::milliseconds(300);
  const std::atomic_ref has_reason(part.has_reason);
  for (const auto end = Clock::now() + kLittle; Clock::now() < end;) {
    if (has_reason.load(std::memory_order_acquire) != 0) return part.reason.data();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return "it stopped because of an error";
}

}  // namespace

std::uint32_t GroupFailure::failed_by() const {
  return std::atomic_ref(shared()->by).load(std::memory_order_acquire);
}

void GroupFailure::name(int rank) const {
  std::uint32_t nobody = 0;
  std::atomic_ref(shared()->by)
      .compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank) + 1);
}

template <typename Write>
void GroupFailure::note(int rank, std::string_view cause, Write write_culprits) noexcept {
  const std::scoped_lock lock(mutex_);
  PeerFailure::Part& part = part_of(rank);
  const bool is_first = part.kind == PeerFailure::none && !has_failed();
  if (!is_first && (part.kind != PeerFailure::gave_up || part.has_reason != 0)) return;
  if (is_first) part.kind = PeerFailure::gave_up;  // others may be reading it by now
  if (!cause.empty()) write_culprits(part);
  write_reason(part, cause);
  if (is_first) name(rank);
}

void GroupFailure::give_up(int rank, std::string_view cause) noexcept {
  note(rank, cause, [](PeerFailure::Part&) {});
}

void GroupFailure::give_up(int rank, std::string_view cause,
                           std::span<const int> world_ranks) noexcept {
  note(rank, cause, [&](PeerFailure::Part& part) {
    part.operation = kNamesWorldRanks;
    part.ranks = {};
    for (const int r : world_ranks) {  // one beyond the mask goes unnamed
      if (r < PeerFailure::kMostRanks) set_rank(part, r);
    }
  });
}

void GroupFailure::blame(int rank, PeerFailure::Kind kind, Meeting meeting,
                         std::span<const int> ranks) noexcept {
  const std::scoped_lock lock(mutex_);
  PeerFailure::Part& part = part_of(rank);
  if (part.kind != PeerFailure::none || has_failed()) return;
  part.operation = static_cast<std::uint32_t>(meeting);
  for (const int r : ranks) set_rank(part, r);
  part.kind = kind;
  name(rank);
}

GroupFailure::Explanation GroupFailure::explain(std::chrono::nanoseconds timeout) const {
  // A device checks that nobody is named before it names itself, but not atomically: two that give
  // up within microseconds may both write, and the last one counts.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const int by = static_cast<int>(failed_by()) - 1;
  PeerFailure::Part& part = part_of(by);
  if (part.kind == PeerFailure::gave_up) {
    auto what = fmt::format("rank {} gave up: {}", by, reason_of(part));  // culprits come with it
    if (part.operation != kNamesWorldRanks) return {std::move(what), {by}};
    return {std::move(what), {}, ranks_of(part)};
  }
  const std::vector<int> ranks = ranks_of(part);
  const auto named = fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  switch (part.kind) {
    case PeerFailure::missing:
      return {
          fmt::format("{0} did not come to {1} within {2:g} s (rank {3} waited)", named,
                      name_of(part.operation), std::chrono::duration<double>(timeout).count(), by),
          ranks};
    case PeerFailure::other_call:
      return {fmt::format("rank {} is in {}, but {} in another call", by, name_of(part.operation),
                          named),
              ranks};
    case PeerFailure::ended:
      return {fmt::format("the process of {} has ended", named), ranks};
    default:
      throw InternalError("a rank gave up without saying how");
  }
}

}  // namespace switchyard
