// Where a rank computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

class DeviceBackend;

struct CpuOptions {
  int num_threads = 1;          // the calling thread is one of them
  std::vector<int> cores = {};  // thread i stays on cores[i]; thread 0 is the caller's own affair
};

// A queue of work on a GPU: a cudaStream_t; null: the device's own, which takes turns with CUDA's
// default stream.
struct Stream {
  void* handle = nullptr;

  friend bool operator==(const Stream&, const Stream&) = default;
};

// Which kernels a GPU uses where it has a choice. Their results agree within rounding.
enum class CudaKernels {
  best,      // those of the GPU's own kind where there are any (Hopper), otherwise portable ones
  portable,  // those that every GPU from sm_80 on can run: to check the others by
};

// A program's own allocator of a GPU's memory, as frameworks have one.
struct DeviceAllocator {
  // Memory for work on the stream, aligned to 256 bytes; null where there is no more. Called while
  // a graph is captured, too.
  std::function<void*(std::int64_t bytes, Stream stream)> allocate = {};
  // The work that used the memory is on the stream already.
  std::function<void(void* memory, Stream stream)> free = {};
};

struct CudaOptions {
  int ordinal = 0;     // which GPU
  Stream stream = {};  // what is used until set_stream
  // Events around the stages of a layer, for LayerStats. They cost microseconds and are left out
  // while a graph is captured.
  bool time_stages = false;
  CudaKernels kernels = CudaKernels::best;
  // With one, the device keeps no memory between calls, but for small tables. Calls may then use
  // different streams without waiting for each other, and captured steps need not have run before.
  DeviceAllocator allocator = {};
};

// A device and the memory it keeps for reuse; copies are the same device. Shared by the layers of a
// rank, and used by one thread at a time. Results do not depend on the number of threads.
//
// On a GPU calls put their work on the device's stream and return at once, except where they say
// that they wait. Tensors given to it are in its memory, and stay as they are until the stream has
// come by. Memory is reused in the order of one stream: after set_stream the new stream must wait
// for what the old one was given. While a stream is being captured into a graph nothing is
// allocated: run the step once before, so that its memory is there, and keep the device and what
// the step was given for as long as the graph is used.
class SWITCHYARD_API Device {
 public:
  Device();  // the CPU, on the calling thread alone
  static Device cpu(const CpuOptions& options);
  // Throws Unsupported, with the reason, where there is no such GPU or the build has no CUDA.
  static Device cuda(const CudaOptions& options = {});
  // What a device does is its backend. Its type is the library's own, for its parts and its tests.
  explicit Device(std::shared_ptr<const DeviceBackend> backend);
  Device(const Device&) = default;
  Device& operator=(const Device&) = default;
  // A move is a copy: it would leave no device behind otherwise.
  // NOLINTNEXTLINE(performance-move-constructor-init)
  Device(Device&& other) noexcept : Device(static_cast<const Device&>(other)) {}
  Device& operator=(Device&& other) noexcept { return *this = static_cast<const Device&>(other); }
  ~Device() = default;

  // Where its tensors lie.
  Memory memory() const;
  int num_threads() const;
  // Memory that was taken, also what other ranks reach of it; in use or kept for reuse.
  std::int64_t bytes_held() const;

  // Uninitialised, in the device's memory; kept for reuse when the last view of it is gone.
  Tensor empty(const Shape& shape, Dtype dtype) const;
  // In the device's memory; `from` may be anywhere. Waits if memory of the host is involved.
  Tensor copy_of(const ConstTensorView& from) const;
  // Waits for the stream.
  Tensor to_host(const ConstTensorView& from) const;
  // Of equal shape and dtype, anywhere. Waits if memory of the host is involved.
  void copy(const ConstTensorView& from, const TensorView& to) const;
  // In the device's memory; rows may lie apart.
  void set_zero(const TensorView& view) const;

  // The stream that the calls that follow use; on a CPU there is none.
  Stream stream() const;
  void set_stream(Stream stream) const;
  // Waits for all work on the stream; not counted in host_syncs().
  void synchronize() const;
  // How often the library has waited for this GPU so far; 0 on a CPU.
  std::int64_t host_syncs() const;

  // Cuts 0 … count − 1 into pieces, calls piece(first, last) for each on the device's threads, and
  // returns when all are done; the first error is thrown here. How it is cut depends on the number
  // of threads: what is computed for one index must not depend on what comes with it. Only on CPUs.
  void parallel_for(std::int64_t count,
                    const std::function<void(std::int64_t first, std::int64_t last)>& piece) const;

 private:
  friend const DeviceBackend& backend_of(const Device& device);  // for the library's own parts

  std::shared_ptr<const DeviceBackend> backend_;
};

}  // namespace switchyard
