// The threads of a CPU device, each with scratch memory of its own.
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

  // Tasks 0 … count − 1, begun in that order; matrix products in them stay on their thread.
  void run(std::int64_t count,
           const std::function<void(std::int64_t task, Scratch& scratch)>& task);

  // 0 … count − 1 cut into one piece a thread: piece(first, last).
  void split(std::int64_t count,
             const std::function<void(std::int64_t first, std::int64_t last)>& piece);

 private:
  ThreadPool pool_;
  std::vector<Scratch> scratch_;  // by worker
};

}  // namespace switchyard::cpu
