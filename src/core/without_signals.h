// SPDX-License-Identifier: Apache-2.0
// Keeps signals off the library's own threads, so that the program's threads handle them, and
// SIGPIPE off its calls.
#pragma once

#include <pthread.h>

#include <cerrno>
#include <csignal>
#include <ctime>

namespace switchyard {

// Blocks all signals on the current thread; threads started during its lifetime inherit that.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_{};
};

// While an instance lives, a write of this thread to a closed connection fails with EPIPE instead
// of ending the process by SIGPIPE. Leaves alone a SIGPIPE that was pending before.
class WithoutBrokenPipes {
 public:
  WithoutBrokenPipes() {
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t before;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before);
    was_blocked_ = sigismember(&before, SIGPIPE) == 1;
  }
  ~WithoutBrokenPipes() {
    constexpr timespec kAtOnce{};
    while (!was_pending_ && sigtimedwait(&pipe_, nullptr, &kAtOnce) < 0 && errno == EINTR) {
    }
    if (!was_blocked_) pthread_sigmask(SIG_UNBLOCK, &pipe_, nullptr);
  }
  WithoutBrokenPipes(const WithoutBrokenPipes&) = delete;
  WithoutBrokenPipes& operator=(const WithoutBrokenPipes&) = delete;

 private:
  sigset_t pipe_{};
  bool was_pending_ = false;
  bool was_blocked_ = false;
};

}  // namespace switchyard
