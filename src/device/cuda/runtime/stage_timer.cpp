// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/runtime/stage_timer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

EventTimer::EventTimer(int ordinal, CUstream_st* stream,
                       std::shared_ptr<std::atomic<std::int64_t>> host_syncs)
    : ordinal_(ordinal), stream_(stream), host_syncs_(std::move(host_syncs)), begin_(record()) {}

EventTimer::Event EventTimer::record() const {
  const OnGpu gpu(ordinal_);
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "making an event");
  Event owner(event, [](CUevent_st* old) { cudaEventDestroy(old); });
  check(cudaEventRecord(event, stream_), "recording an event");
  return owner;
}

void EventTimer::end(std::string_view stage) {
  if (!is_stopped_) ends_.emplace_back(stage, record());
}

std::vector<StageTimer::Stage> EventTimer::read() const {
  std::vector<Stage> stages;
  if (ends_.empty()) return stages;
  ++*host_syncs_;
  check(cudaEventSynchronize(ends_.back().second.get()), "waiting for the stages' events");
  const CUevent_st* from = begin_.get();
  for (const auto& [name, event] : ends_) {
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, const_cast<CUevent_st*>(from), event.get()),
          "reading an event");
    const auto known = std::ranges::find(stages, name, &Stage::name);
    if (known != stages.end()) {
      known->seconds += milliseconds * 1e-3;
    } else {
      stages.push_back({name, milliseconds * 1e-3});
    }
    from = event.get();
  }
  return stages;
}

}  // namespace switchyard::cuda
