// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/runtime/pace.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>

#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

Pace::~Pace() {
  for (CUevent_st* const event : passed_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

void Pace::add(std::int64_t meetings, CUstream_st* stream) {
  num_meetings_ += meetings;
  if (num_meetings_ < kMeetings) return;
  num_meetings_ = 0;
  CUevent_st*& event = passed_[next_++ % passed_.size()];
  if (event == nullptr) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  }
  while (cudaEventQuery(event) == cudaErrorNotReady) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  check(cudaEventRecord(event, stream), "recording an event");
}

}  // namespace switchyard::cuda
