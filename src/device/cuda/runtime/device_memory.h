// A GPU's memory, taken and given back every step in the order of its stream.
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
  // Null where there is no room.
  virtual std::byte* allocate(std::int64_t bytes, CUstream_st* stream) = 0;
  // A block that is free in the order of the stream.
  virtual void free(std::byte* block, CUstream_st* stream) = 0;
  // The blocks that are left when nobody takes any more.
  virtual void close(std::span<std::byte* const> blocks) noexcept = 0;
  // Why there was no room.
  virtual std::string shortage(std::int64_t bytes) const = 0;
  // Whether it reuses blocks by itself, within captures too: then every block goes back at once.
  virtual bool reuses_blocks() const { return false; }
};

// Blocks come from a source: a stream-ordered pool of CUDA, the program's allocator, or one that is
// given. They are kept for reuse, unless the source does that. What a captured step may have used
// belongs to that capture until it is released: a graph may be replayed at any time. May be used
// from any thread; blocks may outlive the object.
class DeviceMemory {
 public:
  explicit DeviceMemory(const CudaOptions& options);
  explicit DeviceMemory(std::shared_ptr<BlockSource> source);

  // Uninitialised, aligned to 256 bytes; goes back when the last view of it is gone. Throws
  // DeviceError where there is no more memory, or if `stream` is being captured and nothing kept
  // fits.
  TensorView take(const Shape& shape, Dtype dtype, CUstream_st* stream);
  // The same for what is kept from step to step: leaves what steps have given back to them.
  TensorView take_to_keep(const Shape& shape, Dtype dtype, CUstream_st* stream);

  // The graph may use every block that is in use between these two calls, even one taken before
  // them. For a capture that someone else began, only the blocks that it takes, and those given
  // back afterwards, are known.
  void begin_capture(std::uint64_t capture);
  void end_capture(std::uint64_t capture);

  // The graph of this capture is gone: what it used is anybody's, in the order of the stream.
  void release(std::uint64_t capture);

  // In use and kept.
  std::int64_t bytes_held() const;

 private:
  struct Blocks;
  enum class Source { given_back, anew };
  TensorView take(const Shape& shape, Dtype dtype, CUstream_st* stream, Source source);

  std::shared_ptr<Blocks> blocks_;
};

// A number for the capture that a stream is in; 0: none.
std::uint64_t capture_of(CUstream_st* stream);

}  // namespace switchyard::cuda
