// SPDX-License-Identifier: Apache-2.0
// Copies between the host and a GPU, staged through pinned memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {

// Pinned host memory, which a GPU copies to and from without staging by the driver.
class PinnedBuffer {
 public:
  PinnedBuffer() { at_least(1); }  // allocates now, because allocating later may block

  // Returns at least that many bytes; their contents are lost when the buffer grows. Outgrown
  // memory is only freed by the destructor: freeing waits for the GPU, where a kernel may be
  // waiting for this very rank.
  std::byte* at_least(std::size_t bytes);

 private:
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::size_t size_ = 0;
};

class HostCopies {
 public:
  // `wait` waits for the context's stream and counts the wait.
  HostCopies(Context& context, std::function<void()> wait)
      : context_(context), wait_(std::move(wait)) {}

  void fetch(const ConstTensorView& from, std::span<std::byte> to);

  // Copies between the host and the GPU, in either direction, and waits. If there are other ranks,
  // it starts only when the stream has drained: CUDA serves one thread at a time for unpinned
  // memory, and may serialise the copies of all streams. A copy that waited for its stream would
  // thus hold up other threads, which a kernel on that stream may be waiting for.
  void copy(const ConstTensorView& from, const TensorView& to, bool has_other_ranks);

 private:
  struct Rows {
    std::int64_t count = 0;
    std::int64_t bytes = 0;  // per row
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
