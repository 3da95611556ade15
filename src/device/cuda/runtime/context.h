// What every CUDA function of this folder works with: the GPU, its stream, memory and small tables.
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

// Where a matrix lies, for kernels that read a table of them.
struct MatrixRef {
  void* data = nullptr;
  std::int64_t row_stride = 0;  // in elements

  friend bool operator==(const MatrixRef&, const MatrixRef&) = default;
};

// Throws DeviceError, naming `what` and CUDA's own words, if `status` (a cudaError_t) is not
// cudaSuccess. After a launch: check(cudaGetLastError(), "the kernel's name").
void check(int status, std::string_view what);

// Switches the calling thread to a GPU, and back when destroyed.
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

// Belongs to one device. Used by one thread at a time, which must have that GPU selected (OnGpu).
class Context {
 public:
  virtual ~Context() = default;

  virtual int ordinal() const = 0;
  virtual CUstream_st* stream() const = 0;  // a cudaStream_t
  virtual int num_multiprocessors() const = 0;
  // Whether kernels for Hopper run here, and are wanted.
  virtual bool uses_hopper_kernels() const = 0;

  // As DeviceBackend's.
  virtual TensorView take(const Shape& shape, Dtype dtype) = 0;
  virtual void set_zero(const TensorView& view) = 0;
  virtual void upload(std::span<const std::byte> from, void* to) = 0;

  // Until end_capture(), work is captured into a graph instead of run: on the stream that the user
  // gave, or else on one that does not synchronise with the legacy stream, whose use by another
  // thread would break the capture. Returns the capture's number.
  virtual std::uint64_t begin_capture() = 0;
  // The graph; null where the capture failed, which `status` (a cudaError_t) tells.
  virtual CUgraph_st* end_capture(int& status) = 0;
  // What a capture took is free again: nothing captured in it will run any more.
  virtual void release_capture(std::uint64_t capture) = 0;

  // Those whose ranks meet in the captured step, since begin_capture().
  virtual void note_meeting(const std::weak_ptr<const PeerCheck>& check) = 0;
  virtual std::vector<std::weak_ptr<const PeerCheck>> take_meetings() = 0;
  // So many meetings go onto the stream. The host waits where it is some dozens ahead of the GPU,
  // so that it never waits inside of CUDA for a full queue.
  virtual void pace(std::int64_t meetings) = 0;

  // The bytes in device memory, aligned to 128: uploaded on `stream` when they are first asked for,
  // and kept; the same bytes asked for again are found. They may be used until thousands of others
  // have been asked for, and in a captured step until the context is gone.
  // For tables of pointers and tensor maps that seldom change.
  virtual const void* constant(std::span<const std::byte> bytes) = 0;
  const MatrixRef* table(std::span<const MatrixRef> refs) {
    return static_cast<const MatrixRef*>(constant(std::as_bytes(refs)));
  }

  // Where stages are timed, the one that began with the last mark ends here.
  virtual void mark(std::string_view stage) = 0;
};

}  // namespace switchyard::cuda
