// Keeps signals off the library's own threads, so that the program's threads handle them.
#pragma once

#include <pthread.h>

#include <csignal>

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

}  // namespace switchyard
