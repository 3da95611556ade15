// SPDX-License-Identifier: Apache-2.0
// A pool of threads that runs numbered tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace switchyard {

class ThreadPool {
 public:
  // Called as task(i, worker). Threads that run at the same time have different worker numbers.
  using Task = std::function<void(std::int64_t task, int worker)>;

  // The thread that calls run() is worker 0. Worker i > 0 is pinned to cores[i] if that exists.
  explicit ThreadPool(int num_threads, std::span<const int> cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMostThreads = 4096;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Starts tasks 0 … count − 1 in that order and returns when all have finished. After an exception
  // no further task starts, and the first exception is rethrown. One caller at a time.
  void run(std::int64_t count, const Task& task);

 private:
  void end();
  void serve(int worker);
  void take_tasks(int worker);

  int generation_;  // fork_generation() of the process that owns the threads
  std::vector<std::thread> threads_;
  const Task* task_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_task_{0};
  std::atomic<std::uint32_t> round_{0};  // incremented to start a round or to end the threads
  std::atomic<int> busy_{0};             // threads that have not finished the current round
  std::atomic<bool> ending_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace switchyard
