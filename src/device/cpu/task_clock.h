// SPDX-License-Identifier: Apache-2.0
// Measures the time that tasks spend in matrix products and elsewhere.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "device/device_backend.h"

namespace switchyard::cpu {

// Each count_…() adds the time since the previous one to its total, unless `times` is null.
class TaskClock {
 public:
  explicit TaskClock(WorkTimes* times) : times_(times), last_(now()) {}
  void count_gemm() { add(times_ != nullptr ? &times_->gemm_ns : nullptr); }
  void count_other() { add(times_ != nullptr ? &times_->other_ns : nullptr); }

 private:
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
  void add(std::atomic<std::int64_t>* to) {
    if (to == nullptr) return;
    const auto time = now();
    to->fetch_add(std::chrono::duration_cast<std::chrono::nanoseconds>(time - last_).count(),
                  std::memory_order_relaxed);
    last_ = time;
  }

  WorkTimes* times_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace switchyard::cpu
