// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/runtime/constants.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>

#include "device/cuda/kernels.h"
#include "device/cuda/runtime/context.h"

namespace switchyard::cuda {
namespace {

// Lets this thread make calls that CUDA rejects during a capture although they do not disturb it.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::shared_ptr<CUevent_st> event_on(CUstream_st* stream) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  std::shared_ptr<CUevent_st> owner(event, [](cudaEvent_t old) { cudaEventDestroy(old); });
  check(cudaEventRecord(event, stream), "recording an event");
  return owner;
}

}  // namespace

// Memory from an allocator that nobody else uses: a framework may forbid long-lived blocks in its
// pools, and CUDA may forbid allocating during a capture. Cuts blocks from slabs and reuses them.
class Constants::Slabs : public std::enable_shared_from_this<Slabs> {
 public:
  TensorView take(std::int64_t words) {
    const std::int64_t bytes = (4 * words + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const std::shared_ptr<std::byte> owner(take_block(bytes),
                                           [slabs = shared_from_this(), bytes](std::byte* block) {
                                             slabs->free_[bytes].push_back(block);
                                           });
    return {owner.get(), Dtype::i32, {words}, 1, owner, Memory::gpu};
  }
  ~Slabs() {
    for (void* const slab : slabs_) cudaFree(slab);
  }

 private:
  static constexpr std::int64_t kBlockBytes = 256;
  static constexpr std::int64_t kSlabBytes = std::int64_t{1} << 20;

  std::byte* take_block(std::int64_t bytes) {
    auto& blocks = free_[bytes];
    if (!blocks.empty()) {
      std::byte* const block = blocks.back();
      blocks.pop_back();
      return block;
    }
    if (bytes > left_) {
      const RelaxedCapture relaxed;
      const std::int64_t size = std::max(bytes, kSlabBytes);
      void* slab = nullptr;
      check(cudaMalloc(&slab, static_cast<std::size_t>(size)), "taking memory for tables");
      slabs_.push_back(slab);
      next_ = static_cast<std::byte*>(slab);
      left_ = size;
    }
    left_ -= bytes;
    return std::exchange(next_, next_ + bytes);
  }

  std::vector<void*> slabs_;
  std::byte* next_ = nullptr;
  std::int64_t left_ = 0;
  std::map<std::int64_t, std::vector<std::byte*>> free_;  // by size
};

Constants::Constants(Streams streams)
    : streams_(streams), slabs_(streams == Streams::any ? std::make_shared<Slabs>() : nullptr) {}

bool Constants::can_use(Table& table, CUstream_st* stream, bool is_captured) {
  if (table.uploaded == nullptr || table.stream == stream) return true;
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaEventQuery(table.uploaded.get());
  if (status == cudaSuccess) {
    table.uploaded = nullptr;
    return true;
  }
  cudaGetLastError();
  if (is_captured) return false;
  check(cudaStreamWaitEvent(stream, table.uploaded.get()), "waiting for a table");
  return true;
}

const void* Constants::find_or_upload(std::span<const std::byte> bytes, DeviceMemory& memory,
                                      CUstream_st* stream) {
  const std::string_view wanted(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const bool is_captured = capture_of(stream) != 0;
  const auto found = by_bytes_.find(wanted);
  if (found != by_bytes_.end() && can_use(*found->second, stream, is_captured)) {
    tables_.splice(tables_.begin(), tables_, found->second);
    if (is_captured && !tables_.front().is_captured) {
      tables_.front().is_captured = true;
      --num_passing_;
    }
    return tables_.front().memory.data();
  }
  const auto words = (static_cast<std::int64_t>(bytes.size()) + 3) / 4;
  tables_.push_front(
      {std::string(wanted),
       slabs_ != nullptr ? slabs_->take(words) : memory.take_to_keep({words}, Dtype::i32, stream),
       is_captured, stream});
  upload_words(bytes, tables_.front().memory.data(), stream);
  // A table uploaded inside a graph is only valid when that graph is replayed, so it is not listed
  // in by_bytes_, where others would find it.
  if (!is_captured) {
    if (streams_ == Streams::any) tables_.front().uploaded = event_on(stream);
    by_bytes_.emplace(tables_.front().bytes, tables_.begin());
    ++num_passing_;
    slabs_ != nullptr ? forget_half() : forget_oldest();
  }
  return tables_.front().memory.data();
}

// Waits for the whole GPU first, because streams that use a table may still be about to read it.
// This happens only once per few thousand tables.
void Constants::forget_half() {
  if (num_passing_ <= kMost) return;
  const RelaxedCapture relaxed;
  check(cudaDeviceSynchronize(), "waiting for the GPU");
  for (auto i = std::prev(tables_.end()); i != tables_.begin() && num_passing_ > kMost / 2;) {
    const auto table = i--;
    if (table->is_captured) continue;
    by_bytes_.erase(table->bytes);
    tables_.erase(table);
    --num_passing_;
  }
}

// Evicts the least recently used table that no captured step uses, so a table that a function has
// just asked for is never evicted.
void Constants::forget_oldest() {
  if (num_passing_ <= kMost) return;
  for (auto i = std::prev(tables_.end()); i != tables_.begin(); --i) {
    if (i->is_captured) continue;
    by_bytes_.erase(i->bytes);
    tables_.erase(i);
    --num_passing_;
    return;
  }
}

}  // namespace switchyard::cuda
