// SPDX-License-Identifier: Apache-2.0
// Streams, events and graphs of the emulated GPU. A stream is a thread that does its work in order;
// a graph keeps the work as functions.
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "emulation/launch.h"
#include "emulation/runtime.h"

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st : CUgraph_st {};

// What an event was last recorded for.
struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_passed = false;
  std::chrono::steady_clock::time_point time;

  void pass() {
    const std::scoped_lock lock(mutex);
    is_passed = true;
    time = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_passed; });
  }
};
struct CUevent_st {
  std::shared_ptr<Mark> mark;
};

struct CUstream_st {
  CUgraph_st* captured = nullptr;
  unsigned long long capture = 0;  // its number

  // The legacy stream waits for it, unless it was made with cudaStreamNonBlocking.
  const bool is_blocking;

  explicit CUstream_st(bool blocks) : is_blocking(blocks), worker_([this] { run(); }) {}
  ~CUstream_st() {
    add(nullptr);
    worker_.join();
  }
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  void add(std::function<void()> work) {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool is_idle() {
    const std::scoped_lock lock(mutex_);
    return work_.empty();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return work_.empty(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !work_.empty(); });
      if (!work_.front()) return;
      lock.unlock();
      work_.front()();  // stays in front until it is done; references to a deque's elements stay
                        // valid
      lock.lock();
      work_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;  // an empty function ends the thread
  std::thread worker_;
};

namespace emulation {
namespace {

struct Streams {
  std::mutex mutex;
  std::set<cudaStream_t> all;

  // Waits for what streams were given so far. Ranks may make and end streams meanwhile.
  void wait(bool only_blocking) {
    std::vector<std::shared_ptr<Mark>> marks;
    {
      const std::scoped_lock lock(mutex);
      for (CUstream_st* const stream : all) {
        if (stream->is_idle() || (only_blocking && !stream->is_blocking)) continue;
        const auto mark = std::make_shared<Mark>();
        stream->add([mark] { mark->pass(); });
        marks.push_back(mark);
      }
    }
    for (const auto& mark : marks) mark->wait();
  }
};
Streams& streams() {
  static auto* const all = new Streams;
  return *all;
}

}  // namespace

bool is_legacy(cudaStream_t stream) { return stream == nullptr || stream == cudaStreamLegacy; }

void wait_for_streams() { streams().wait(false); }

void do_on_stream(cudaStream_t stream, std::function<void()> work) {
  if (is_legacy(stream)) {
    streams().wait(true);
    work();
  } else if (stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
  } else {
    stream->add(std::move(work));
  }
}

bool can_launch(const Launch& launch) {
  const auto threads = std::uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  const auto blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  const bool can = threads > 0 && threads <= 1024 && blocks > 0 && launch.grid.x <= 0x7FFFFFFF &&
                   launch.grid.y <= 65535 && launch.grid.z <= 65535 &&
                   launch.shared_bytes <= kSharedBytes;
  if (!can) noted(cudaErrorInvalidConfiguration);
  return can;
}

}  // namespace emulation

using emulation::do_on_stream;
using emulation::is_legacy;
using emulation::noted;
using emulation::streams;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st(flags != cudaStreamNonBlocking);
  const std::scoped_lock lock(streams().mutex);
  streams().all.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::scoped_lock lock(streams().mutex);
    streams().all.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_legacy(stream)) {
    streams().wait(true);
  } else if (stream->captured != nullptr) {
    return noted(cudaErrorStreamCaptureUnsupported);
  } else {
    stream->wait();
  }
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (is_legacy(stream)) return noted(cudaErrorInvalidValue);
  if (stream->captured != nullptr) return noted(cudaErrorStreamCaptureUnsupported);
  return stream->is_idle() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  do_on_stream(stream, [=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (event->mark != nullptr) do_on_stream(stream, [mark = event->mark] { mark->wait(); });
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->mark = std::make_shared<Mark>();
  do_on_stream(stream, [mark = event->mark] { mark->pass(); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->mark == nullptr) return cudaSuccess;
  const std::scoped_lock lock(event->mark->mutex);
  return event->mark->is_passed ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->mark != nullptr) event->mark->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto time = end->mark->time - begin->mark->time;
  *milliseconds = std::chrono::duration<float, std::milli>(time).count();
  return cudaSuccess;
}

// Graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> captures{0};
  stream->captured = new CUgraph_st;
  stream->capture = ++captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = std::exchange(stream->captured, nullptr);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, std::size_t*) {
  const bool captures = !is_legacy(stream) && stream->captured != nullptr;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (captures) *id = stream->capture;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
  *count = graph->work.size();
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  for (const auto& work : graph->work) do_on_stream(stream, work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

}  // extern "C"
