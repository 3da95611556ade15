// SPDX-License-Identifier: Apache-2.0
#include "run/stop_signals.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>

namespace switchyard::train {
namespace {

// Globals, as signals reach a process and not an object.
std::atomic<std::int64_t> g_noted{0};  // time of the first signal in nanoseconds; 0: none yet
static_assert(std::atomic<std::int64_t>::is_always_lock_free, "it is set by a signal handler");
std::mutex g_mutex;
int g_users = 0;
constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
std::array<struct sigaction, kSignals.size()> g_before{};

constexpr std::int64_t kSecond = 1'000'000'000;

std::int64_t nanoseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);  // async-signal-safe, unlike std::chrono
  return now.tv_sec * kSecond + now.tv_nsec;
}

void note(int number) {
  const int error = errno;
  const auto now = nanoseconds_now();
  std::int64_t first = 0;
  const bool is_first = g_noted.compare_exchange_strong(first, now);
  if (!is_first && number == SIGINT && now - first >= kSecond) {
    std::signal(number, SIG_DFL);
    std::raise(number);  // delivered when the handler returns
  }
  errno = error;
}

}  // namespace

StopSignals::StopSignals() {
  const std::lock_guard lock(g_mutex);
  if (g_users++ > 0) return;
  g_noted = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = kSignals[i] == SIGPIPE ? SIG_IGN : note;
    action.sa_flags = SA_RESTART;
    sigaction(kSignals[i], &action, &g_before[i]);
    const bool stays_ignored = kSignals[i] == SIGHUP && g_before[i].sa_handler == SIG_IGN;
    if (stays_ignored) sigaction(kSignals[i], &g_before[i], nullptr);
  }
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(g_mutex);
  if (--g_users > 0) return;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &g_before[i], nullptr);
  }
}

bool StopSignals::received() const { return g_noted != 0; }

}  // namespace switchyard::train
