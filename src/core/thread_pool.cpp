// SPDX-License-Identifier: Apache-2.0
// An atomic counter hands out tasks. Between rounds, threads spin briefly and then sleep.
#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include "core/process.h"
#include "core/require.h"
#include "core/signals_wait.h"
#include "core/standard_floats.h"

namespace switchyard {
namespace {

constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Blocks until `value` differs from `old`.
template <typename T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

void stay_on_core(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a failure costs only speed
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::span<const int> cores)
    : generation_(fork_generation()) {
  require(1 <= num_threads && num_threads <= kMostThreads, "num_threads ({}) must be 1 to {}",
          num_threads, int{kMostThreads});
  for (const int core : cores) {
    require(0 <= core && core < CPU_SETSIZE, "core {} must be 0 to {}", core, CPU_SETSIZE - 1);
  }
  const SignalsWait for_the_threads;  // workers inherit the mask; other threads handle signals
  try {
    for (int worker = 1; worker < num_threads; ++worker) {
      const auto index = static_cast<std::size_t>(worker);
      const int core = index < cores.size() ? cores[index] : -1;
      threads_.emplace_back([this, worker, core] {
        if (core >= 0) stay_on_core(core);
        serve(worker);
      });
    }
  } catch (const std::exception& error) {
    const auto started = threads_.size();
    end();
    throw DeviceError(fmt::format("only {1} of {0} threads could be started: {2}", num_threads,
                                  started + 1, error.what()));
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  if (generation_ != fork_generation()) {  // a forked child has none of the threads
    for (auto& thread : threads_) thread.detach();
    return;
  }
  ending_ = true;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run(std::int64_t count, const Task& task) {
  if (count <= 0) return;
  require<DeviceError>(threads_.empty() || generation_ == fork_generation(),
                       "the {} threads of this device belong to the parent process and do not "
                       "exist after fork(); make a new device in this process",
                       num_threads());
  const StandardFloats standard;
  task_ = &task;
  count_ = count;
  next_task_.store(0, std::memory_order_relaxed);
  if (count > 1 && !threads_.empty()) {
    busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  take_tasks(0);
  for (int left = busy_.load(std::memory_order_acquire); left != 0;
       left = busy_.load(std::memory_order_acquire)) {
    wait_while(busy_, left);
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::serve(int worker) {
  const StandardFloats standard;  // a thread inherits its creator's modes
  std::uint32_t seen = 0;
  while (true) {
    wait_while(round_, seen);
    ++seen;
    if (ending_) return;
    take_tasks(worker);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_all();
  }
}

void ThreadPool::take_tasks(int worker) {
  while (true) {
    const auto task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= count_) return;
    try {
      (*task_)(task, worker);
    } catch (...) {
      next_task_.store(count_, std::memory_order_relaxed);
      const std::scoped_lock lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
}

}  // namespace switchyard
