// SPDX-License-Identifier: Apache-2.0
// Zeroes, copies and poisons rows, and uploads host values to GPU memory.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "device/cuda/kernels.h"
#include "device/cuda/rows/row_table.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kCopySteps = 4;

// Calls body with a value of the widest word type that divides all these sizes and addresses (the
// argument is their bitwise OR). Elements have at least two bytes.
template <typename Body>
void with_word_of(std::uint64_t sizes_and_addresses, Body body) {
  if (sizes_and_addresses % sizeof(uint4) == 0) {
    body(uint4{});
  } else if (sizes_and_addresses % sizeof(std::uint32_t) == 0) {
    body(std::uint32_t{});
  } else {
    body(std::uint16_t{});
  }
}

std::uint64_t address_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    zero_padding_kernel(std::byte* rows, std::int64_t stride, std::int64_t words,
                        const std::int32_t* valid, std::int64_t count) {
  const std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (r >= count || valid[r] != 0) return;
  auto* row = reinterpret_cast<Word*>(rows + r * stride);
  for (std::int64_t w = threadIdx.x % kWarp; w < words; w += kWarp) row[w] = Word{};
}

}  // namespace

void zero_padding(const TensorView& rows, const ConstTensorView& valid, Context& context) {
  if (rows.bytes() == 0) return;
  const auto sizes = static_cast<std::uint64_t>(rows.row_bytes() | rows.row_stride_bytes());
  with_word_of(sizes | address_of(rows.data()), [&]<typename Word>(Word) {
    zero_padding_kernel<Word><<<blocks_for(rows.rows(), kWarps), kThreads, 0, context.stream()>>>(
        rows.data(), rows.row_stride_bytes(),
        rows.row_bytes() / static_cast<std::int64_t>(sizeof(Word)),
        reinterpret_cast<const std::int32_t*>(valid.data()), rows.rows());
    check(cudaGetLastError(), "zero_padding");
  });
}

namespace {

struct SpoiledView {
  std::byte* data;
  std::int64_t stride;   // in bytes
  std::int64_t columns;  // elements per row
  std::int64_t count;    // elements in total
  std::int64_t element_bytes;
};

__global__ void __launch_bounds__(kThreads)
    spoil_kernel(const std::uint32_t* failed, const SpoiledView* views, int num_views) {
  if (*failed == 0) return;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int v = 0; v < num_views; ++v) {
    const SpoiledView view = views[v];
    for (std::int64_t i = first; i < view.count;
         i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
      const std::int64_t row = i / view.columns;
      std::byte* const at =
          view.data + row * view.stride + (i - row * view.columns) * view.element_bytes;
      if (view.element_bytes == 2) {
        *reinterpret_cast<std::uint16_t*>(at) = 0x7fc0;
      } else {
        *reinterpret_cast<std::uint32_t*>(at) = 0x7fc00000;
      }
    }
  }
}

}  // namespace

void spoil(const std::uint32_t* failed, std::span<const TensorView> views, Context& context) {
  std::vector<SpoiledView> spoiled;
  for (const TensorView& view : views) {
    if (view.bytes() == 0) continue;
    spoiled.push_back({view.data(), view.row_stride_bytes(), view.shape().row_elements(),
                       view.shape().num_elements(), size_of(view.dtype())});
  }
  if (spoiled.empty()) return;
  const auto* table =
      static_cast<const SpoiledView*>(context.constant(std::as_bytes(std::span(spoiled))));
  spoil_kernel<<<static_cast<unsigned>(context.num_multiprocessors()), kThreads, 0,
                 context.stream()>>>(failed, table, static_cast<int>(spoiled.size()));
  check(cudaGetLastError(), "spoil");
}

namespace {

struct CopyWork {
  const std::byte* from;
  std::int64_t from_stride;  // in bytes
  std::byte* to;
  std::int64_t to_stride;
  std::int64_t rows;
  std::int64_t row_bytes;
};

// Each warp copies a piece of one row, kCopySteps words per lane. It issues all loads before the
// first store.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const CopyWork work, std::int64_t words, std::int64_t per_row) {
  const std::int64_t unit = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const std::int64_t r = per_row == 1 ? unit : unit / per_row;
  if (r >= work.rows) return;
  const std::int64_t first =
      (unit - r * per_row) * (kWarp * kCopySteps) + static_cast<int>(threadIdx.x % kWarp);
  const auto* from = reinterpret_cast<const Word*>(work.from + r * work.from_stride);
  auto* to = reinterpret_cast<Word*>(work.to + r * work.to_stride);
  Word data[kCopySteps];
#pragma unroll
  for (int s = 0; s < kCopySteps; ++s) {
    if (first + s * kWarp < words) data[s] = from[first + s * kWarp];
  }
#pragma unroll
  for (int s = 0; s < kCopySteps; ++s) {
    if (first + s * kWarp < words) to[first + s * kWarp] = data[s];
  }
}

void launch_copy(const CopyWork& work, Context& context) {
  if (work.rows * work.row_bytes == 0) return;
  std::uint64_t sizes =
      address_of(work.from) | address_of(work.to) | static_cast<std::uint64_t>(work.row_bytes);
  if (work.rows > 1) sizes |= static_cast<std::uint64_t>(work.from_stride | work.to_stride);
  with_word_of(sizes, [&]<typename Word>(Word) {
    const std::int64_t words = work.row_bytes / static_cast<std::int64_t>(sizeof(Word));
    const std::int64_t per_row = blocks_for(words, kWarp * kCopySteps);
    copy_kernel<Word><<<blocks_for(work.rows * per_row, kWarps), kThreads, 0, context.stream()>>>(
        work, words, per_row);
    check(cudaGetLastError(), "copy_rows");
  });
}

}  // namespace

void copy_rows(const ConstTensorView& from, const TensorView& to, Context& context) {
  if (!from.is_contiguous() || !to.is_contiguous()) {
    return launch_copy({from.data(), from.row_stride_bytes(), to.data(), to.row_stride_bytes(),
                        from.rows(), from.row_bytes()},
                       context);
  }
  // Copies everything as one long row. A tail that is not a whole chunk is copied separately,
  // unless a second launch would take longer than copying everything in smaller words.
  constexpr std::int64_t kFewBytes = 4096;
  const std::int64_t rest = from.bytes() <= kFewBytes ? 0 : from.bytes() % kChunkBytes;
  const std::int64_t body = from.bytes() - rest;
  launch_copy({from.data(), 0, to.data(), 0, 1, body}, context);
  launch_copy({from.data() + body, 0, to.data() + body, 0, 1, rest}, context);
}

namespace {

// Bytes passed as a kernel parameter: the caller may reuse its buffer at once, and a graph keeps
// the copy.
template <int Size>
struct Parcel {
  alignas(4) unsigned char bytes[Size];
};

template <int Size>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ Parcel<Size> parcel, unsigned char* to, int count,
                  bool aligned) {
  const int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * 4;
  if (aligned && first + 4 <= count) {
    *reinterpret_cast<std::uint32_t*>(to + first) =
        *reinterpret_cast<const std::uint32_t*>(parcel.bytes + first);
    return;
  }
  for (int b = first; b < first + 4 && b < count; ++b) to[b] = parcel.bytes[b];
}

template <int Size>
void send(std::span<const std::byte> from, void* to, CUstream_st* stream) {
  Parcel<Size> parcel;
  std::memcpy(parcel.bytes, from.data(), from.size());
  const auto count = static_cast<std::int64_t>(from.size());
  unpack_kernel<Size><<<blocks_for(count, 4 * kThreads), kThreads, 0, stream>>>(
      parcel, static_cast<unsigned char*>(to), static_cast<int>(count), address_of(to) % 4 == 0);
  check(cudaGetLastError(), "upload");
}

}  // namespace

void upload_words(std::span<const std::byte> from, void* to, CUstream_st* stream) {
  constexpr std::size_t kSmall = 256;
  constexpr std::size_t kLarge = 4000;  // every GPU accepts up to 4096 bytes of parameters
  auto* at = static_cast<std::byte*>(to);
  for (std::size_t sent = 0; sent < from.size();) {
    const auto part = from.subspan(sent, std::min(from.size() - sent, kLarge));
    if (part.size() <= kSmall) {
      send<kSmall>(part, at + sent, stream);
    } else {
      send<kLarge>(part, at + sent, stream);
    }
    sent += part.size();
  }
}

}  // namespace switchyard::cuda
