// SPDX-License-Identifier: Apache-2.0
// The shared page, and the watch on the processes behind it.
#include "comm/mpi/board.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "comm/find_minority.h"
#include "core/require.h"

namespace switchyard::mpi {
namespace {

// A waiting rank beats about once a millisecond; one that has not for this long counts as silent.
constexpr auto kSilent = std::chrono::milliseconds(500);

constexpr std::int64_t kNoPage = -1;

template <std::size_t N>
void write_text(std::array<char, N>& to, std::string_view text) {
  const auto n = std::min(text.size(), N - 1);
  std::memcpy(to.data(), text.data(), n);
  to[n] = '\0';
}

template <std::size_t N>
std::string read_text(const std::array<char, N>& from) {
  return {from.data(), ::strnlen(from.data(), N)};
}

std::string identity_of(const char* path) {
  struct stat info {};
  return ::stat(path, &info) == 0 ? fmt::format("{}:{}", info.st_dev, info.st_ino) : "none";
}

}  // namespace

Hello make_hello() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  const auto processes = identity_of("/proc/self/ns/pid");
  // Without /proc this process cannot see any other, so it counts as a host of its own.
  const auto visible = processes == "none"
                           ? fmt::format("process {} of {}", ::getpid(), ::gethostid())
                           : fmt::format("{} {}", boot_id, processes);
  return {::getpid(), std::hash<std::string>{}(visible)};
}

Board::Board(int rank, std::span<const Hello> hellos)
    : rank_(rank), hellos_(hellos.begin(), hellos.end()), watches_(hellos.size()) {
  const auto mine = hellos_[static_cast<std::size_t>(rank)].host;
  const auto first = std::ranges::find(hellos_, mine, &Hello::host);
  creator_ = static_cast<int>(first - hellos_.begin());
  for (std::size_t r = 0; r < hellos_.size(); ++r) {
    const bool is_peer = hellos_[r].host == mine && static_cast<int>(r) != rank;
    if (is_peer && hellos_[r].pid > 0) watches_[r] = ProcessWatch::of(hellos_[r].pid);
  }
}

std::int64_t Board::page_bytes() const {
  return static_cast<std::int64_t>(sizeof(Entry) * hellos_.size());
}

// If the page cannot be created, the board sees no peers and only deadlines remain.
std::int64_t Board::create() {
  if (!is_creator()) return kNoPage;
  try {
    pages_.emplace(page_bytes());
    return pages_->file().get();
  } catch (const DeviceError&) {
    return kNoPage;
  }
}

void Board::open(std::span<const std::int64_t> created) {
  const auto number = created[static_cast<std::size_t>(creator_)];
  if (number == kNoPage) return;
  try {
    if (!is_creator()) {
      const auto path =
          fmt::format("/proc/{}/fd/{}", hellos_[static_cast<std::size_t>(creator_)].pid, number);
      Descriptor page(::open(path.c_str(), O_RDWR | O_CLOEXEC));
      struct stat info {};
      const bool is_whole =
          page.is_open() && ::fstat(page.get(), &info) == 0 && info.st_size >= page_bytes();
      if (!is_whole) return;
      pages_.emplace(std::move(page), page_bytes());
    }
  } catch (const DeviceError&) {
    return;
  }
  entries_ = reinterpret_cast<Entry*>(pages_->bytes().data());
  entries_[rank_].state.store(State::joined);
}

void Board::close() {
  if (pages_) pages_->close_file();
}

void Board::enter(std::uint64_t phase, std::string_view call, std::int64_t unit_bytes) {
  if (entries_ == nullptr) return;
  const auto now = Clock::now();
  Entry& own = entries_[rank_];
  Call& slot = own.calls[phase % own.calls.size()];
  slot.phase.store(0);
  write_text(slot.name, call);
  slot.unit_bytes.store(unit_bytes);
  slot.arrived.store(now);
  slot.phase.store(phase);
  own.entered.store(phase);
  own.last_beat.store(now);
}

void Board::complete(std::uint64_t phase) {
  if (entries_ != nullptr) entries_[rank_].completed.store(phase);
}

void Board::beat() {
  if (entries_ != nullptr) entries_[rank_].last_beat.store(Clock::now());
}

void Board::add_waits(std::uint64_t phase, std::span<std::chrono::nanoseconds> waits) const {
  if (entries_ == nullptr) return;
  const auto own = read_arrival(entries_[rank_], phase);
  for (std::size_t r = 0; r < waits.size(); ++r) {
    const Entry* entry = peer(static_cast<int>(r));
    const auto other = entry != nullptr ? read_arrival(*entry, phase) : std::nullopt;
    if (own && other) waits[r] += std::max(*other - *own, Clock::duration::zero());
  }
}

void Board::give_up(std::string_view reason, std::span<const int> culprits) {
  if (entries_ == nullptr) return;
  Entry& own = entries_[rank_];
  write_text(own.reason, reason);
  own.num_culprits = static_cast<std::int32_t>(std::min(culprits.size(), own.culprits.size()));
  std::copy_n(culprits.begin(), own.num_culprits, own.culprits.begin());
  own.state.store(State::gave_up);
}

void Board::leave() {
  if (entries_ == nullptr) return;
  State expected = State::joined;
  entries_[rank_].state.compare_exchange_strong(expected, State::left);
}

const Board::Entry* Board::peer(int rank) const {
  const bool same_host =
      hellos_[static_cast<std::size_t>(rank)].host == hellos_[static_cast<std::size_t>(rank_)].host;
  if (entries_ == nullptr || rank == rank_ || !same_host) return nullptr;
  const Entry& entry = entries_[rank];
  return entry.state.load() == State::unknown ? nullptr : &entry;
}

bool Board::has_died(int rank) const {
  const auto& watch = watches_[static_cast<std::size_t>(rank)];
  return watch != nullptr && watch->has_ended();
}

std::optional<Board::CallText> Board::read_call(const Entry& entry, std::uint64_t phase) {
  const Call& slot = entry.calls[phase % entry.calls.size()];
  if (slot.phase.load() != phase) return std::nullopt;
  CallText call{read_text(slot.name), slot.unit_bytes.load()};
  if (slot.phase.load() != phase) return std::nullopt;  // overwritten while being read
  return call;
}

std::optional<Board::Clock::time_point> Board::read_arrival(const Entry& entry,
                                                            std::uint64_t phase) {
  const Call& slot = entry.calls[phase % entry.calls.size()];
  if (slot.phase.load() != phase) return std::nullopt;
  const auto arrived = slot.arrived.load();
  if (slot.phase.load() != phase) return std::nullopt;
  return arrived;
}

Board::Trouble Board::find_breach(std::uint64_t phase) const {
  if (entries_ == nullptr) return {};
  const auto own = read_call(entries_[rank_], phase);
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    const Entry* entry = peer(r);
    if (entry == nullptr) continue;
    if (entry->state.load() == State::gave_up && entry->completed.load() < phase) {
      return trouble_of(r, *entry);
    }
    const auto other = read_call(*entry, phase);
    if (!own || !other || *other == *own) continue;
    return {culprits_of_breach(phase, *own),
            other->name != own->name
                ? fmt::format("rank {} called {} instead; all ranks must make the same calls in "
                              "the same order",
                              r, other->name)
                : fmt::format("rank {} passed {} bytes, but rank {} passed {}", r,
                              other->unit_bytes, rank_, own->unit_bytes)};
  }
  return {};
}

std::vector<int> Board::culprits_of_breach(std::uint64_t phase, const CallText& own) const {
  std::vector<int> alike;
  std::vector<int> others;
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    const Entry* entry = r == rank_ ? &entries_[r] : peer(r);
    const auto call = entry != nullptr ? read_call(*entry, phase) : std::nullopt;
    if (call) (*call == own ? alike : others).push_back(r);
  }
  return alike.empty() || others.empty() ? others : find_minority(alike, others);
}

Board::Trouble Board::trouble_of(int rank, const Entry& entry) const {
  const auto reason = read_text(entry.reason);
  const std::vector<int> culprits(entry.culprits.begin(),
                                  entry.culprits.begin() + entry.num_culprits);
  const auto blames = [&](int r) { return std::ranges::find(culprits, r) != culprits.end(); };
  if (blames(rank_) || blames(rank)) {
    return {{rank}, fmt::format("rank {} gave up: {}", rank, reason)};
  }
  return {culprits, fmt::format("{} (reported by rank {})", reason, rank), true};
}

Board::Trouble Board::find_trouble(std::uint64_t phase) const {
  if (auto breach = find_breach(phase); !breach.reason.empty()) return breach;
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    const Entry* entry = peer(r);
    if (entry != nullptr) {
      if (entry->completed.load() >= phase) continue;  // this rank does not wait for it
      if (entry->state.load() == State::left) {
        return {{r}, fmt::format("rank {} left before it", r)};
      }
    }
    if (has_died(r)) {
      return {.ranks = {r},
              .reason = fmt::format("rank {} died (process {} has ended)", r,
                                    hellos_[static_cast<std::size_t>(r)].pid),
              .is_death = true};
    }
  }
  return {};
}

bool Board::has_all(std::uint64_t phase) const {
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    const Entry* entry = peer(r);
    if (entry != nullptr && entry->entered.load() < phase) return false;
  }
  return true;
}

std::vector<int> Board::find_missing(std::uint64_t phase) const {
  std::vector<int> missing;
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    const Entry* entry = peer(r);
    if (entry == nullptr || entry->completed.load() >= phase) continue;
    const auto entered = entry->entered.load();
    const bool waits_elsewhere = entered > entry->completed.load();  // in an earlier phase
    const bool absent = entered < phase && !waits_elsewhere;
    const bool silent = Clock::now() - entry->last_beat.load() > kSilent;
    if (absent || silent) missing.push_back(r);
  }
  return missing;
}

std::vector<int> Board::find_unseen() const {
  std::vector<int> unseen;
  for (int r = 0; r < static_cast<int>(hellos_.size()); ++r) {
    if (r != rank_ && peer(r) == nullptr) unseen.push_back(r);
  }
  return unseen;
}

}  // namespace switchyard::mpi
