// SPDX-License-Identifier: Apache-2.0
// The contents of the C interface's handles, and the conversion of exceptions to error codes.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "core/require.h"
#include "switchyard/c/switchyard.h"
#include "switchyard/device.h"

struct switchyard_device {
  explicit switchyard_device(std::function<switchyard::Device()> how)
      : id(next_id++), make(std::move(how)), device(make()) {}

  static inline std::atomic<std::uint64_t> next_id = 0;
  const std::uint64_t id;
  std::function<switchyard::Device()> make;  // makes another device like it
  switchyard::Device device;
  std::mutex mutex = {};
};

namespace switchyard::c {

// Stores the message of the exception being handled for switchyard_last_error(), and returns its
// kind.
int report_error();

// Dereferences a caller's pointer, or throws if it is null.
template <typename T>
T& at(T* pointer, std::string_view name) {
  require(pointer != nullptr, "{} is a null pointer", name);
  return *pointer;
}

template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return switchyard_ok;
  } catch (...) {
    return report_error();
  }
}

// Returns the number that `work` returns, or -1 after an error.
template <typename Work>
std::int64_t number_of(const Work& work) {
  std::int64_t number = -1;
  guarded([&] { number = work(); });
  return number;
}

// Runs `work` on the caller's stream. Calls on one device run one at a time.
template <typename Work>
int on_stream(switchyard_device* device, void* stream, const Work& work) {
  return guarded([&] {
    const std::scoped_lock lock(at(device, "device").mutex);
    if (device->device.memory() == Memory::gpu) device->device.set_stream({stream});
    work(device->device);
  });
}

}  // namespace switchyard::c
