#include "run/stop_signals.h"

#include <array>
#include <atomic>
#include <mutex>

namespace switchyard::train {
namespace {

// Signals reach a process, not an object.
std::atomic<bool> g_received{false};
static_assert(std::atomic<bool>::is_always_lock_free, "it is set by a signal handler");
std::mutex g_mutex;
int g_users = 0;
constexpr std::array kSignals{SIGINT, SIGTERM};
std::array<struct sigaction, kSignals.size()> g_before{};

void note(int /*signal*/) { g_received = true; }

}  // namespace

StopSignals::StopSignals() {
  const std::lock_guard lock(g_mutex);
  if (g_users++ > 0) return;
  g_received = false;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &g_before[i]);
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(g_mutex);
  if (--g_users > 0) return;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &g_before[i], nullptr);
  }
}

bool StopSignals::received() const { return g_received; }

}  // namespace switchyard::train
