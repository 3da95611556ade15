// SPDX-License-Identifier: Apache-2.0
// Keeps signal handlers off a thread while it computes.
#pragma once

#include <pthread.h>

#include <csignal>

namespace switchyard {

// Blocks all signals on the current thread, except those raised by its own faults, for the lifetime
// of the object. Blocked signals stay pending or go to other threads. Threads started meanwhile
// inherit the mask and keep it.
class SignalsWait {
 public:
  SignalsWait() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&all, fault);
    }
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsWait() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsWait(const SignalsWait&) = delete;
  SignalsWait& operator=(const SignalsWait&) = delete;

 private:
  sigset_t before_;
};

}  // namespace switchyard
