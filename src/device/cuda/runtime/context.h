// SPDX-License-Identifier: Apache-2.0
// The state that every CUDA function works with: the GPU, its stream, memory and small tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "device/peer_memory.h"
#include "switchyard/tensor.h"

struct CUgraph_st;
struct CUstream_st;

namespace switchyard::cuda {

// The location of a matrix, for kernels that read a table of them.
struct MatrixRef {
  void* data = nullptr;
  std::int64_t row_stride = 0;  // in elements

  friend bool operator==(const MatrixRef&, const MatrixRef&) = default;
};

// Throws DeviceError with `what` and CUDA's own message if `status` (a cudaError_t) is not
// cudaSuccess. After a launch: check(cudaGetLastError(), "the kernel's name").
void check(int status, std::string_view what);

// Selects a GPU for the calling thread; the destructor restores the previous one.
class OnGpu {
 public:
  explicit OnGpu(int ordinal);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  int before_ = 0;
  bool has_changed_ = false;
};

// Hopper's own kernels are stubs unless compiled for sm_90a; plain sm_90 is not enough.
#if defined(SWITCHYARD_NO_HOPPER_KERNELS)
constexpr bool kHasHopperKernels = false;
#else
constexpr bool kHasHopperKernels = true;
#endif

// Belongs to one device. Only one thread may use it at a time, with that GPU selected (OnGpu).
class Context {
 public:
  virtual ~Context() = default;

  virtual int ordinal() const = 0;
  virtual CUstream_st* stream() const = 0;  // a cudaStream_t
  virtual int num_multiprocessors() const = 0;
  // True if this GPU can run the Hopper kernels and the options do not exclude them.
  virtual bool uses_hopper_kernels() const = 0;

  // See DeviceBackend.
  virtual TensorView take(const Shape& shape, Dtype dtype) = 0;
  virtual void set_zero(const TensorView& view) = 0;
  virtual void upload(std::span<const std::byte> from, void* to) = 0;

  // Captures work into a graph, instead of running it, until end_capture(). It does so on the
  // stream that the user gave, or else on one that does not synchronise with the legacy stream:
  // another thread's use of the legacy stream would break the capture. Returns the capture's
  // number.
  virtual std::uint64_t begin_capture() = 0;
  // Returns the graph, or null if the capture failed; `status` (a cudaError_t) then holds the
  // error.
  virtual CUgraph_st* end_capture(int& status) = 0;
  // Makes the memory that a capture took available again. Nothing captured in it may run any more.
  virtual void release_capture(std::uint64_t capture) = 0;

  // Notes that a meeting goes onto the stream. During a capture it is recorded for take_meetings(),
  // otherwise it counts for pace().
  virtual void note_meeting(const std::weak_ptr<const PeerCheck>& check) = 0;
  // Returns, and forgets, the meetings recorded since begin_capture().
  virtual std::vector<std::weak_ptr<const PeerCheck>> take_meetings() = 0;
  // Counts meetings that go onto the stream. Blocks while the host is a few dozen meetings ahead of
  // the GPU, so that it never blocks inside CUDA on a full queue.
  virtual void pace(std::int64_t meetings) = 0;

  // Returns a copy of the bytes in device memory, aligned to 128. The first call uploads them on
  // the stream; later calls with the same bytes find that copy. It stays valid until thousands of
  // others have been asked for, or, if a captured step uses it, until the context is gone.
  // For tables of pointers and tensor maps that seldom change.
  virtual const void* constant(std::span<const std::byte> bytes) = 0;
  const MatrixRef* table(std::span<const MatrixRef> refs) {
    return static_cast<const MatrixRef*>(constant(std::as_bytes(refs)));
  }

  // Ends the stage that began at the last mark, if stages are being timed.
  virtual void mark(std::string_view stage) = 0;
};

}  // namespace switchyard::cuda
