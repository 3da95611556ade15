// SPDX-License-Identifier: Apache-2.0
#include "comm/mpi/roll_call.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string_view>
#include <thread>

#include "core/hash.h"
#include "core/require.h"
#include "core/without_signals.h"

namespace switchyard::mpi {
namespace {

// The environment variables with which a launcher identifies a process.
struct Launcher {
  const char* rank;
  const char* size;
  std::array<const char*, 2> job;  // together they identify a job on a host
};
constexpr std::array<Launcher, 3> kLaunchers{{
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {"PMIX_NAMESPACE", "PMIX_SERVER_URI2"}},
    {"PMI_RANK", "PMI_SIZE", {"PMI_JOBID", "PMI_PORT"}},
    {"SLURM_PROCID", "SLURM_NTASKS", {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
}};

constexpr auto kLookInterval = std::chrono::milliseconds(20);

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

std::optional<int> number_in(const char* name) {
  const auto text = variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_whole = error == std::errc() && end == text.data() + text.size();
  return is_whole ? std::optional(value) : std::nullopt;
}

}  // namespace

std::unique_ptr<RollCall> RollCall::answer() {
  for (const Launcher& launcher : kLaunchers) {
    const auto rank = number_in(launcher.rank);
    const auto size = number_in(launcher.size);
    if (!rank || !size || *rank < 0 || *rank >= *size) continue;
    const auto job =
        fmt::format("{} {} {}", ::geteuid(), variable(launcher.job[0]), variable(launcher.job[1]));
    try {
      return std::unique_ptr<RollCall>(
          new RollCall(hash_of(std::span<const char>(job)), *rank, *size));
    } catch (const Unsupported&) {  // no local sockets: only deadlines remain
      return nullptr;
    }
  }
  return nullptr;
}

struct RollCall::Message {
  int rank = 0;
  bool asks = false;      // the sender has not heard from the receiver
  bool gives_up = false;  // otherwise the sender only says that it is here
  int culprit = kNobody;
  std::array<char, 192> reason = {};  // NUL-terminated
};

RollCall::RollCall(std::int64_t job, int rank, int size)
    : job_(job), rank_(rank), mailbox_(name_of(rank)), peers_(static_cast<std::size_t>(size)) {}

void RollCall::look(std::span<const int> ranks) {
  take_messages();
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookInterval;
  for (const int r : find_unseen(ranks)) send(r, {.rank = rank_, .asks = true});
}

void RollCall::send(int rank, const Message& message) const {
  mailbox_.send(name_of(rank), std::as_bytes(std::span(&message, 1)));
}

void RollCall::take_messages() {
  Message message;
  while (const auto sender = mailbox_.receive(std::as_writable_bytes(std::span(&message, 1)))) {
    if (message.rank < 0 || message.rank >= size()) continue;
    Peer& peer = peers_[static_cast<std::size_t>(message.rank)];
    if (peer.process == nullptr) peer.process = ProcessWatch::of(sender->pid);
    if (message.asks) send(message.rank, {.rank = rank_});
    if (!message.gives_up || message.culprit >= size()) continue;
    message.reason.back() = '\0';
    peer.reported = {message.culprit, message.reason.data()};
  }
}

std::optional<RollCall::Trouble> RollCall::find_trouble(std::span<const int> ranks) {
  for (const int r : ranks) {
    const Peer& peer = peers_[static_cast<std::size_t>(r)];
    if (peer.process == nullptr || !peer.process->has_ended()) continue;
    return first_cause(
        {r, fmt::format("rank {} died (process {} has ended)", r, peer.process->pid())});
  }
  return find_report();
}

RollCall::Trouble RollCall::first_cause(Trouble seen) {
  take_messages();
  return find_report().value_or(std::move(seen));
}

std::optional<RollCall::Trouble> RollCall::find_report() const {
  for (const Peer& peer : peers_) {
    if (peer.reported && peer.reported->rank != rank_) return peer.reported;
  }
  return std::nullopt;
}

std::optional<RollCall::Trouble> RollCall::find_report_of(int rank) {
  take_messages();
  const auto& reported = peers_[static_cast<std::size_t>(rank)].reported;
  return reported && reported->rank != rank_ ? reported : std::nullopt;
}

void RollCall::report(const Trouble& trouble) const {
  Message message{.rank = rank_, .gives_up = true, .culprit = trouble.rank};
  trouble.reason.copy(message.reason.data(), message.reason.size() - 1);
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) send(r, message);
  }
}

void RollCall::report_unseen(std::span<const int> ranks, const std::string& reason) const {
  const auto unseen = find_unseen(ranks);
  report({unseen.empty() ? kNobody : unseen.front(), reason});
}

std::vector<int> RollCall::find_unseen(std::span<const int> ranks) const {
  std::vector<int> unseen;
  std::ranges::copy_if(ranks, std::back_inserter(unseen), [&](int r) {
    return r != rank_ && peers_[static_cast<std::size_t>(r)].process == nullptr;
  });
  return unseen;
}

std::string words_for_unseen(const std::vector<int>& ranks) {
  if (ranks.empty()) return {};
  return fmt::format("rank{} {} {} not been seen on this host", ranks.size() == 1 ? "" : "s",
                     fmt::join(ranks, ", "), ranks.size() == 1 ? "has" : "have");
}

struct InitWatchdog::State {
  RollCall* roll_call;
  std::chrono::milliseconds timeout;
  std::mutex mutex = {};
  std::condition_variable changed = {};
  bool is_over = false;
  std::thread thread = {};

  [[noreturn]] void exit(const std::string& why) const {
    const auto who = roll_call == nullptr
                         ? std::string("this process")
                         : fmt::format("rank {} of {}", roll_call->rank(), roll_call->size());
    std::fputs(
        fmt::format(
            "switchyard: {} gives up in MPI_Init, which never returns if a rank is missing: {}\n",
            who, why)
            .c_str(),
        stderr);
    std::fflush(stderr);
    ::_exit(1);
  }

  void watch() {
    std::vector<int> all(static_cast<std::size_t>(roll_call == nullptr ? 0 : roll_call->size()));
    std::iota(all.begin(), all.end(), 0);
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kLookInterval, [&] { return is_over; })) {
      if (roll_call != nullptr) {
        roll_call->look(all);
        if (const auto trouble = roll_call->find_trouble(all)) {
          roll_call->report(*trouble);
          exit(trouble->reason);
        }
      }
      if (std::chrono::steady_clock::now() < deadline) continue;
      const auto unseen =
          roll_call == nullptr ? std::string() : words_for_unseen(roll_call->find_unseen(all));
      const auto why =
          fmt::format("{:g} s have passed; {}", static_cast<double>(timeout.count()) / 1000.0,
                      unseen.empty() ? "all ranks that can be seen from here are alive" : unseen);
      if (roll_call != nullptr) roll_call->report_unseen(all, why);
      exit(why);
    }
  }
};

InitWatchdog::InitWatchdog(RollCall* roll_call, std::chrono::milliseconds timeout)
    : state_(new State{.roll_call = roll_call, .timeout = timeout}) {
  const WithoutSignals without_signals;
  state_->thread = std::thread([state = state_.get()] { state->watch(); });
}

InitWatchdog::~InitWatchdog() {
  {
    const std::scoped_lock lock(state_->mutex);
    state_->is_over = true;
  }
  state_->changed.notify_all();
  state_->thread.join();
}

}  // namespace switchyard::mpi
