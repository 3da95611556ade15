// SPDX-License-Identifier: Apache-2.0
// C interface: devices and errors.
#include <new>
#include <stdexcept>

#include "c/handles.h"
#include "core/require.h"
#include "switchyard/build_info.h"
#include "switchyard/c/layers.h"
#include "switchyard/error.h"

namespace switchyard::c {
namespace {

thread_local std::string last_error;

int keep(int kind, const char* message) {
  last_error = message == nullptr ? "no message was given" : message;
  return kind;
}

}  // namespace

int report_error() {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return keep(switchyard_invalid_argument, error.what());
  } catch (const Unsupported& error) {
    return keep(switchyard_unsupported, error.what());
  } catch (const CommunicationError& error) {
    return keep(switchyard_communication_error, error.what());
  } catch (const StorageError& error) {
    return keep(switchyard_storage_error, error.what());
  } catch (const DeviceError& error) {
    return keep(switchyard_device_error, error.what());
  } catch (const InternalError& error) {
    return keep(switchyard_internal_error, error.what());
  } catch (const std::bad_alloc&) {
    return keep(switchyard_out_of_memory, "the host is out of memory");
  } catch (const std::exception& error) {
    return keep(switchyard_other_error, error.what());
  } catch (...) {
    return keep(switchyard_other_error, "an exception that is not a std::exception was thrown");
  }
}

}  // namespace switchyard::c

using namespace switchyard;  // NOLINT(google-build-using-namespace): functions of C are in none
using c::guarded;

const char* switchyard_version() {
  static const std::string text(version());
  return text.c_str();
}

const char* switchyard_last_error() { return c::last_error.c_str(); }

int switchyard_fail(int kind, const char* message) { return c::keep(kind, message); }

int switchyard_device_cpu(int64_t num_threads, switchyard_device** device) {
  return guarded([&] {
    require(0 < num_threads && num_threads <= 4096, "num_threads ({}) must be 1 to 4096",
            num_threads);
    c::at(device, "device") = new switchyard_device(
        [num_threads] { return Device::cpu({.num_threads = static_cast<int>(num_threads)}); });
  });
}

int switchyard_device_cuda(int64_t ordinal, int64_t portable, switchyard_allocate allocate,
                           switchyard_free release, switchyard_device** device) {
  return guarded([&] {
    require(0 <= ordinal && ordinal < 1024, "there is no GPU {}", ordinal);
    CudaOptions options{.ordinal = static_cast<int>(ordinal),
                        .kernels = portable != 0 ? CudaKernels::portable : CudaKernels::best};
    if (allocate != nullptr) {
      require(release != nullptr, "allocate was given without release: give both");
      options.allocator.allocate = [allocate](std::int64_t bytes, Stream stream) {
        return allocate(bytes, stream.handle);
      };
      options.allocator.free = [release](void* memory, Stream stream) {
        release(memory, stream.handle);
      };
    }
    c::at(device, "device") = new switchyard_device([options] { return Device::cuda(options); });
  });
}

void switchyard_device_free(switchyard_device* device) { delete device; }

int64_t switchyard_device_host_syncs(switchyard_device* device) {
  return c::number_of([&] {
    const std::scoped_lock lock(c::at(device, "device").mutex);
    return device->device.host_syncs();
  });
}

int64_t switchyard_device_bytes_held(switchyard_device* device) {
  return c::number_of([&] {
    const std::scoped_lock lock(c::at(device, "device").mutex);
    return device->device.bytes_held();
  });
}
