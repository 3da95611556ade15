// SPDX-License-Identifier: Apache-2.0
// GPU memory that is taken and given back every step, in stream order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "switchyard/device.h"
#include "switchyard/tensor.h"

struct CUstream_st;

namespace switchyard::cuda {

// Where the blocks of a DeviceMemory come from.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Returns null if there is no room.
  virtual std::byte* allocate(std::int64_t bytes, CUstream_st* stream) = 0;
  // Frees a block in stream order.
  virtual void free(std::byte* block, CUstream_st* stream) = 0;
  // Receives the remaining blocks when nothing will be taken any more.
  virtual void close(std::span<std::byte* const> blocks) noexcept = 0;
  // Says why there was no room.
  virtual std::string shortage(std::int64_t bytes) const = 0;
  // True if the source reuses blocks itself, during captures too. Every block then goes back to it
  // at once.
  virtual bool reuses_blocks() const { return false; }
};

// Takes blocks from a source: a stream-ordered CUDA pool, the program's allocator, or a given
// source. Keeps them for reuse, unless the source does that itself. A block that a captured step
// may have used belongs to that capture until it is released, because a graph may be replayed at
// any time. Thread-safe. Blocks may outlive the object.
class DeviceMemory {
 public:
  explicit DeviceMemory(const CudaOptions& options);
  explicit DeviceMemory(std::shared_ptr<BlockSource> source);

  // Returns uninitialised memory, aligned to 256 bytes, which goes back when its last view is gone.
  // Throws DeviceError if there is no more memory, or if `stream` is being captured and no kept
  // block fits.
  TensorView take(const Shape& shape, Dtype dtype, CUstream_st* stream);
  // Like take(), for memory that is kept from step to step. Does not use up blocks that a step has
  // given back, which the next step will take again.
  TensorView take_to_keep(const Shape& shape, Dtype dtype, CUstream_st* stream);

  // The graph may use every block that is in use between these two calls, even one taken earlier.
  // For a capture that someone else began, only the blocks that it takes, and those given back
  // after that, are known.
  void begin_capture(std::uint64_t capture);
  void end_capture(std::uint64_t capture);

  // Makes the blocks of a capture available to everyone, in stream order. Its graph must be gone.
  void release(std::uint64_t capture);

  // Bytes in use or kept for reuse.
  std::int64_t bytes_held() const;

 private:
  struct Blocks;
  enum class Source { given_back, anew };
  TensorView take(const Shape& shape, Dtype dtype, CUstream_st* stream, Source source);

  std::shared_ptr<Blocks> blocks_;
};

// Returns the number of the capture that a stream is in, or 0 if it is not being captured.
std::uint64_t capture_of(CUstream_st* stream);

}  // namespace switchyard::cuda
