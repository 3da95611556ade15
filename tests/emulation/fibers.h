// SPDX-License-Identifier: Apache-2.0
// Threads of execution that switch to each other without the system, for x86-64.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace emulation {

// Runs a function on a stack of its own. Not an owner of what that function's stack holds: a fiber
// that is destroyed before its function has returned destroys no variables.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the fiber run `body` from its beginning at the next resume().
  void start(std::function<void()> body);
  // Runs the fiber until it calls suspend() or returns. Called outside of fibers.
  void resume();
  // Returns to the caller of resume(). Called by the fiber itself.
  void suspend();
  bool is_done() const { return is_done_; }

 private:
  static void enter(Fiber* fiber);

  std::byte* stack_ = nullptr;
  void* mine_ = nullptr;  // stack pointers
  void* callers_ = nullptr;
  std::function<void()> body_;
  bool is_done_ = true;
};

}  // namespace emulation
