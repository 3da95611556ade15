// SPDX-License-Identifier: Apache-2.0
// System calls that fail on demand. Linking failing_calls.cpp into a program replaces these calls;
// all others are unaffected.
#pragma once

#include <string>

namespace switchyard::testing {

enum class Fault {
  no_space,     // ENOSPC
  io_error,     // EIO
  interrupted,  // EINTR
  short_write,  // half of the bytes are written; affects no other call
};

// Returns the system's message for the fault.
std::string words_for(Fault fault);

// While it exists, makes one call fail that names or writes a file under `folder`: open, allocate,
// write, sync, rename, link or mkdir. Calls are counted over all threads that count.
class FailingCalls {
 public:
  // The n-th call from now on fails, counting from 0 and only calls that the fault can affect.
  FailingCalls(std::string folder, Fault fault, int n, bool can_exchange_names = true);
  ~FailingCalls();
  FailingCalls(const FailingCalls&) = delete;
  FailingCalls& operator=(const FailingCalls&) = delete;

  // Whether calls of the current thread count, and fail; true at first.
  static void count_this_thread(bool is_counted);
  // Returns the name of the call that failed; empty if there were fewer calls.
  static std::string failed();
};

}  // namespace switchyard::testing
