// SPDX-License-Identifier: Apache-2.0
// The threads of a CPU device, each with its own scratch memory.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "device/cpu/scratch.h"

namespace switchyard::cpu {

class Workers {
 public:
  explicit Workers(int num_threads, std::span<const int> cores = {})
      : pool_(num_threads, cores), scratch_(static_cast<std::size_t>(num_threads)) {}

  int num_threads() const { return pool_.num_threads(); }
  std::int64_t scratch_bytes() const;

  // Runs tasks 0 … count − 1, which start in that order. Matrix products in a task stay on its
  // thread. Signals are blocked on the calling thread until all tasks are done.
  void run(std::int64_t count,
           const std::function<void(std::int64_t task, Scratch& scratch)>& task);

  // Cuts 0 … count − 1 into at most one piece per thread and calls piece(first, last) for each.
  void split(std::int64_t count,
             const std::function<void(std::int64_t first, std::int64_t last)>& piece);

 private:
  ThreadPool pool_;
  std::vector<Scratch> scratch_;  // indexed by worker
};

}  // namespace switchyard::cpu
