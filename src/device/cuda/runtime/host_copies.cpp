// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/runtime/host_copies.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "device/cuda/kernels.h"

namespace switchyard::cuda {

std::byte* PinnedBuffer::at_least(std::size_t bytes) {
  if (bytes > size_) {
    const std::size_t size = bytes < 65536 ? 65536 : 2 * bytes;
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, size, cudaHostAllocMapped | cudaHostAllocPortable),
          "taking pinned memory");
    memory_.emplace_back(static_cast<std::byte*>(memory),
                         [](std::byte* old) { cudaFreeHost(old); });
    size_ = size;
  }
  return memory_.back().get();
}

void HostCopies::fetch(const ConstTensorView& from, std::span<std::byte> to) {
  std::byte* staged = pinned_.at_least(to.size());
  // Copies with a kernel: a copy-engine transfer that waits for this stream may hold up transfers
  // of other streams, which this stream may in turn be waiting for.
  const Shape halves{static_cast<std::int64_t>(to.size() / 2)};
  cuda::copy_rows(ConstTensorView(from.data(), Dtype::bf16, halves, 1, nullptr, Memory::gpu),
                  TensorView(staged, Dtype::bf16, halves, 1, nullptr, Memory::gpu), context_);
  wait_();
  std::copy_n(staged, to.size(), to.data());
}

void HostCopies::copy(const ConstTensorView& from, const TensorView& to, bool has_other_ranks) {
  constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;
  const bool is_plain = from.is_contiguous() && to.is_contiguous();
  const std::int64_t row_bytes = is_plain ? 1 : from.row_bytes();
  const std::int64_t rows = is_plain ? from.bytes() : from.rows();
  const std::int64_t most_rows = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
  for (std::int64_t first = 0; first < rows; first += most_rows) {
    const std::int64_t count = std::min(most_rows, rows - first);
    if (has_other_ranks) wait_();
    copy_piece({from.data() + first * (is_plain ? 1 : from.row_stride_bytes()),
                is_plain ? count : from.row_stride_bytes()},
               {to.data() + first * (is_plain ? 1 : to.row_stride_bytes()),
                is_plain ? count : to.row_stride_bytes()},
               {is_plain ? 1 : count, is_plain ? count : row_bytes}, from.memory() == Memory::host);
  }
}

void HostCopies::copy_piece(const Spaced<const std::byte>& from, const Spaced<std::byte>& to,
                            const Rows& rows, bool from_host) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  std::byte* const staged = pinned_.at_least(size(rows.count * rows.bytes));
  const auto copy_rows = [&](const std::byte* source, std::int64_t source_stride, std::byte* target,
                             std::int64_t target_stride) {
    for (std::int64_t r = 0; r < rows.count; ++r) {
      std::copy_n(source + r * source_stride, rows.bytes, target + r * target_stride);
    }
  };
  if (from_host) copy_rows(from.data, from.stride, staged, rows.bytes);
  check(from_host ? cudaMemcpy2DAsync(to.data, size(to.stride), staged, size(rows.bytes),
                                      size(rows.bytes), size(rows.count), cudaMemcpyHostToDevice,
                                      context_.stream())
                  : cudaMemcpy2DAsync(staged, size(rows.bytes), from.data, size(from.stride),
                                      size(rows.bytes), size(rows.count), cudaMemcpyDeviceToHost,
                                      context_.stream()),
        "copying between the host and the GPU");
  wait_();
  if (!from_host) copy_rows(staged, rows.bytes, to.data, to.stride);
}

}  // namespace switchyard::cuda
