// Threads that share out numbered tasks.
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
  // task(i, worker): worker tells apart the threads that run at the same time.
  using Task = std::function<void(std::int64_t task, int worker)>;

  // The thread that calls run() is worker 0; worker i > 0 stays on cores[i] where there is one.
  explicit ThreadPool(int num_threads, std::span<const int> cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMostThreads = 4096;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs tasks 0 … count − 1, begun in that order, and returns when all have ended. After an error
  // no further task is begun, and the error that came first is thrown. One caller at a time.
  void run(std::int64_t count, const Task& task);

 private:
  void end();
  void serve(int worker);
  void take_tasks(int worker);

  int generation_;  // of the process that has the threads
  std::vector<std::thread> threads_;
  const Task* task_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_task_{0};
  std::atomic<std::uint32_t> round_{0};  // grows when there is work, and to end
  std::atomic<int> busy_{0};             // threads that have not finished the round
  std::atomic<bool> ending_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace switchyard
