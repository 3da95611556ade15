// SPDX-License-Identifier: Apache-2.0
#include "core/process_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <map>
#include <mutex>

namespace switchyard {

std::shared_ptr<const ProcessWatch> ProcessWatch::of(std::int64_t pid) {
  static std::mutex mutex;
  static auto* const watches = new std::map<std::int64_t, std::weak_ptr<const ProcessWatch>>();
  const std::scoped_lock lock(mutex);
  std::erase_if(*watches, [](const auto& entry) { return entry.second.expired(); });
  auto watch = (*watches)[pid].lock();
  if (watch == nullptr || watch->has_ended()) {  // a new process may have reused the pid
    watch = std::make_shared<const ProcessWatch>(pid);
    (*watches)[pid] = watch;
  }
  return watch;
}

ProcessWatch::ProcessWatch(std::int64_t pid)
    : pid_(pid), process_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  had_ended_ = !process_.is_open() && errno == ESRCH;
}

// Without a pidfd this falls back to kill(pid, 0), which reports a zombie as alive.
bool ProcessWatch::has_ended() const {
  if (had_ended_) return true;
  if (!process_.is_open()) return ::kill(static_cast<pid_t>(pid_), 0) != 0 && errno == ESRCH;
  pollfd watch{process_.get(), POLLIN, 0};
  return ::poll(&watch, 1, 0) == 1;
}

}  // namespace switchyard
