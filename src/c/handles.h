// What the handles of the C interface hold, and how errors leave it.
#pragma once

#include <exception>
#include <mutex>
#include <string>

#include "switchyard/c/switchyard.h"
#include "switchyard/device.h"

struct switchyard_device {
  switchyard::Device device;
  std::mutex mutex = {};
};

namespace switchyard::c {

// Keeps the message of the exception that is being handled for switchyard_last_error(), and gives
// its kind.
int report_error();

template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return switchyard_ok;
  } catch (...) {
    return report_error();
  }
}

// One call at a time, on the caller's stream.
template <typename Work>
int on_stream(switchyard_device* device, void* stream, const Work& work) {
  return guarded([&] {
    const std::scoped_lock lock(device->mutex);
    if (device->device.memory() == Memory::gpu) device->device.set_stream({stream});
    work(device->device);
  });
}

}  // namespace switchyard::c
