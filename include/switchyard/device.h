// SPDX-License-Identifier: Apache-2.0
// The CPU threads or the GPU that a rank computes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

class DeviceBackend;

// Options of Device::cpu().
struct CpuOptions {
  int num_threads = 1;          // including the calling thread
  std::vector<int> cores = {};  // thread i > 0 is pinned to cores[i]; thread 0, the caller, is not
};

// A queue of work on a GPU (a cudaStream_t). Null stands for the device's own stream, which
// synchronises with CUDA's default stream.
struct Stream {
  void* handle = nullptr;

  friend bool operator==(const Stream&, const Stream&) = default;
};

// Selects the kernels that a GPU uses where it has a choice. Their results agree within rounding.
enum class CudaKernels {
  best,      // kernels for this kind of GPU (Hopper) where there are any, otherwise portable ones
  portable,  // kernels that run on every GPU from sm_80 on; a reference for the others
};

// A program's own allocator of GPU memory, such as a framework's.
struct DeviceAllocator {
  // Returns memory for work on the stream, aligned to 256 bytes, or null if there is none left.
  // Also called while a graph is being captured.
  std::function<void*(std::int64_t bytes, Stream stream)> allocate = {};
  // Frees memory. The work that used it is already on the stream.
  std::function<void(void* memory, Stream stream)> free = {};
};

// Options of Device::cuda().
struct CudaOptions {
  int ordinal = 0;     // the number of the GPU
  Stream stream = {};  // used until set_stream
  // Times the stages of a layer with events, for LayerStats. Costs microseconds per stage; nothing
  // is timed while a graph is being captured.
  bool time_stages = false;
  CudaKernels kernels = CudaKernels::best;
  // An allocator to use instead of the device's own memory pool. With one, the device keeps no
  // memory between calls except small tables. Calls may then use different streams without waiting
  // for each other, and a step need not run before it is captured.
  DeviceAllocator allocator = {};
};

// A device and the memory that it keeps for reuse. Copies refer to the same device. The layers of a
// rank share it, and one thread at a time may use it. Results do not depend on the number of
// threads.
//
// On a GPU, calls enqueue their work on the device's stream and return at once, unless their
// comment says that they wait. Tensors given to a GPU must be in its memory, and must not be
// changed or freed until the stream has passed the work that uses them. Memory is reused in the
// order of one stream, so after set_stream the new stream must wait for the work on the old one.
// Nothing is allocated while a stream is being captured into a graph: run the step once before, so
// that its memory exists, and keep the device and the step's arguments as long as the graph is in
// use.
class SWITCHYARD_API Device {
 public:
  // The CPU, using only the calling thread.
  Device();
  static Device cpu(const CpuOptions& options);
  // Returns a GPU. Throws Unsupported, with the reason, if there is no such GPU or the build has no
  // CUDA.
  static Device cuda(const CudaOptions& options = {});
  // Wraps a backend. DeviceBackend is internal; this is for the library's own parts and tests.
  explicit Device(std::shared_ptr<const DeviceBackend> backend);
  Device(const Device&) = default;
  Device& operator=(const Device&) = default;
  // A move copies, because it would otherwise leave an object without a device behind.
  // NOLINTNEXTLINE(performance-move-constructor-init)
  Device(Device&& other) noexcept : Device(static_cast<const Device&>(other)) {}
  Device& operator=(Device&& other) noexcept { return *this = static_cast<const Device&>(other); }
  ~Device() = default;

  // The kind of memory that its tensors are in.
  Memory memory() const;
  int num_threads() const;
  // The number of bytes currently allocated, in use or kept for reuse, including memory that other
  // ranks access.
  std::int64_t bytes_held() const;

  // Returns an uninitialised tensor in the device's memory. The memory is kept for reuse when the
  // last view of it is gone.
  Tensor empty(const Shape& shape, Dtype dtype) const;
  // Returns a copy in the device's memory of a tensor in host memory or in the device's own. Waits
  // if host memory is involved.
  Tensor copy_of(const ConstTensorView& from) const;
  // Returns a copy in host memory. Waits for the stream.
  Tensor to_host(const ConstTensorView& from) const;
  // Copies between tensors of equal shape and dtype, each in host memory or in the device's. Waits
  // if host memory is involved.
  void copy(const ConstTensorView& from, const TensorView& to) const;
  // Fills a tensor in the device's memory with zeros. The view may have any row stride.
  void set_zero(const TensorView& view) const;

  // The stream that subsequent calls use. A CPU has none.
  Stream stream() const;
  void set_stream(Stream stream) const;
  // Waits for all work on the stream. Not counted in host_syncs().
  void synchronize() const;
  // The number of times that the library has waited for this GPU; 0 on a CPU.
  std::int64_t host_syncs() const;

  // Splits 0 … count − 1 into ranges, calls piece(first, last) for each on the device's threads,
  // and returns when all are done. The half-open ranges depend on the number of threads, so the
  // result for an index must not depend on the rest of its range. Rethrows the first error. Throws
  // Unsupported on a GPU.
  void parallel_for(std::int64_t count,
                    const std::function<void(std::int64_t first, std::int64_t last)>& piece) const;

 private:
  friend const DeviceBackend& backend_of(const Device& device);  // internal

  std::shared_ptr<const DeviceBackend> backend_;
};

}  // namespace switchyard
