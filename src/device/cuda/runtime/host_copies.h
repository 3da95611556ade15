// Copies between the host and a GPU, by way of pinned memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

// Memory of the host that a GPU copies to without the driver's help.
class PinnedBuffer {
 public:
  PinnedBuffer() { at_least(1); }  // taking it may wait, which is best done at once

  // Its bytes; what was there is lost when it grows. What it had before is freed with it alone:
  // freeing waits for the GPU, where a kernel may wait for this very rank.
  std::byte* at_least(std::size_t bytes);

 private:
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::size_t size_ = 0;
};

class HostCopies {
 public:
  // `wait` waits for the context's stream, and counts that.
  HostCopies(Context& context, std::function<void()> wait)
      : context_(context), wait_(std::move(wait)) {}

  void fetch(const ConstTensorView& from, std::span<std::byte> to);

  // Between the host and the GPU, either way; waits. Where there are other ranks, it copies once
  // the stream has come to an end: CUDA copies to and from memory that is not pinned for one thread
  // at a time, and copies of all streams may take turns. So one that waited for its stream would
  // hold up other threads, for which a kernel on that stream may wait.
  void copy(const ConstTensorView& from, const TensorView& to, bool has_other_ranks);

 private:
  struct Rows {
    std::int64_t count = 0;
    std::int64_t bytes = 0;  // of one
  };
  template <typename Byte>
  struct Spaced {
    Byte* data = nullptr;
    std::int64_t stride = 0;  // in bytes
  };
  void copy_piece(const Spaced<const std::byte>& from, const Spaced<std::byte>& to,
                  const Rows& rows, bool from_host);

  Context& context_;
  std::function<void()> wait_;
  PinnedBuffer pinned_;
};

}  // namespace switchyard::cuda
