// Calls of the system that fail when a test says so. The program that has failing_calls.cpp in it
// makes these calls by way of it; others are as ever.
#pragma once

#include <string>

namespace switchyard::testing {

enum class Fault {
  no_space,     // ENOSPC
  io_error,     // EIO
  interrupted,  // EINTR
  short_write,  // half of the bytes are written; of no other call
};

// What the system says of it.
std::string words_for(Fault fault);

// Those that name or write a file under `folder`: opening, making room, writing, syncing, renaming,
// linking, making a folder. Calls are counted over all threads.
class FailingCalls {
 public:
  // The n-th from now on fails, counted from 0; of those that the fault can befall.
  FailingCalls(std::string folder, Fault fault, int n, bool can_exchange_names = true);
  ~FailingCalls();
  FailingCalls(const FailingCalls&) = delete;
  FailingCalls& operator=(const FailingCalls&) = delete;

  // The name of the call; empty: there were fewer.
  static std::string failed();
};

}  // namespace switchyard::testing
