// SPDX-License-Identifier: Apache-2.0
// The context of one GPU device.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/require.h"
#include "device/cuda/kernels.h"
#include "device/cuda/peer/heap.h"
#include "device/cuda/runtime/constants.h"
#include "device/cuda/runtime/device_memory.h"
#include "device/cuda/runtime/host_copies.h"
#include "device/cuda/runtime/pace.h"
#include "device/cuda/runtime/stage_timer.h"
#include "switchyard/device.h"

namespace switchyard::cuda {

// A heap that other ranks can access. Its blocks are taken and reused in the order of the stream.
class CudaHeap final : public PeerHeap {
 public:
  CudaHeap(HeapSource source, const Context& context)
      : source_(std::move(source)),
        memory_(std::make_shared<DeviceMemory>(source_.blocks)),
        context_(context) {}

  const std::shared_ptr<DeviceMemory>& memory() const { return memory_; }
  std::byte* base() const override { return source_.base; }
  std::int64_t reserved_bytes() const override { return source_.reserved_bytes; }
  TensorView take(const Shape& shape, Dtype dtype) override {
    return memory_->take(shape, dtype, context_.stream());
  }
  bool holds(const ConstTensorView& view) const override {
    return source_.base <= view.data() && view.data() < source_.base + source_.reserved_bytes;
  }
  std::int64_t bytes_held() const override { return memory_->bytes_held(); }

 private:
  HeapSource source_;
  std::shared_ptr<DeviceMemory> memory_;
  const Context& context_;
};

class CudaContext final : public Context {
 public:
  explicit CudaContext(const CudaOptions& options)
      : options_(options),
        memory_(options),
        constants_(options.allocator.allocate ? Constants::Streams::any
                                              : Constants::Streams::in_order) {
    check(cudaStreamCreate(&own_stream_), "making a stream");
    set_stream(static_cast<CUstream_st*>(options.stream.handle));
    check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount,
                                 options.ordinal),
          "asking for multiprocessors");
    int major = 0;
    int minor = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, options.ordinal),
          "asking for the compute capability");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, options.ordinal),
          "asking for the compute capability");
    uses_hopper_kernels_ =
        kHasHopperKernels && major == 9 && minor == 0 && options.kernels == CudaKernels::best;
  }

  ~CudaContext() override {  // ignores errors: at program exit the driver may already be gone
    cudaStreamDestroy(own_stream_);
    if (capture_stream_ != nullptr) cudaStreamDestroy(capture_stream_);
  }

  int ordinal() const override { return options_.ordinal; }
  CUstream_st* stream() const override { return stream_; }
  void set_stream(CUstream_st* stream) { stream_ = stream != nullptr ? stream : own_stream_; }
  int num_multiprocessors() const override { return num_multiprocessors_; }
  bool uses_hopper_kernels() const override { return uses_hopper_kernels_; }

  TensorView take(const Shape& shape, Dtype dtype) override {
    return memory_.take(shape, dtype, stream_);
  }
  std::int64_t bytes_held() const {
    std::int64_t bytes = memory_.bytes_held();
    for (const auto& heap : heaps_) {
      if (const auto memory = heap.lock()) bytes += memory->bytes_held();
    }
    return bytes;
  }
  std::uint64_t begin_capture() override {
    require<DeviceError>(capturing_ == nullptr,
                         "a step cannot be captured inside another captured step");
    if (stream_ == own_stream_ && capture_stream_ == nullptr) {
      check(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking), "making a stream");
    }
    auto* const stream = stream_ == own_stream_ ? capture_stream_ : stream_;
    // Thread-local mode lets other threads keep allocating during the capture.
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
          "beginning to capture a step");
    capturing_ = stream;
    stream_before_ = std::exchange(stream_, stream);
    capture_ = capture_of(stream);
    for_all_memory([&](DeviceMemory& memory) { memory.begin_capture(capture_); });
    return capture_;
  }
  CUgraph_st* end_capture(int& status) override {
    for_all_memory([&](DeviceMemory& memory) { memory.end_capture(capture_); });
    stream_ = stream_before_;
    cudaGraph_t graph = nullptr;
    status = cudaStreamEndCapture(std::exchange(capturing_, nullptr), &graph);
    return graph;
  }
  void release_capture(std::uint64_t capture) override {
    for_all_memory([&](DeviceMemory& memory) { memory.release(capture); });
  }
  void note_meeting(const std::weak_ptr<const PeerCheck>& check) override {
    if (capturing_ != nullptr) {
      meetings_.push_back(check);
    } else {
      pace(1);
    }
  }
  void pace(std::int64_t meetings) override {
    if (capture_of(stream_) == 0) pace_.add(meetings, stream_);
  }
  std::vector<std::weak_ptr<const PeerCheck>> take_meetings() override {
    return std::exchange(meetings_, {});
  }
  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) {
    auto heap = std::make_shared<CudaHeap>(make_heap_source(options_.ordinal, options), *this);
    std::erase_if(heaps_, [](const auto& old) { return old.expired(); });
    heaps_.push_back(heap->memory());
    return heap;
  }
  void set_zero(const TensorView& view) override {
    if (view.bytes() == 0) return;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    // The 2D call is for strided views only: a pitch must be below 2³¹ bytes, a row need not be.
    check(view.is_contiguous()
              ? cudaMemsetAsync(view.data(), 0, size(view.bytes()), stream_)
              : cudaMemset2DAsync(view.data(), size(view.row_stride_bytes()), 0,
                                  size(view.row_bytes()), size(view.rows()), stream_),
          "setting memory to zero");
  }
  void upload(std::span<const std::byte> from, void* to) override {
    upload_words(from, to, stream_);
  }
  const void* constant(std::span<const std::byte> bytes) override {
    return constants_.find_or_upload(bytes, memory_, stream_);
  }

  void mark(std::string_view stage) override {
    if (const auto timer = timer_.lock()) timer->end(stage);
  }
  std::shared_ptr<StageTimer> time_stages() {
    timer_.reset();
    if (!options_.time_stages || capture_of(stream_) != 0) return nullptr;
    auto timer = std::make_shared<EventTimer>(options_.ordinal, stream_, host_syncs_);
    timer_ = timer;
    return timer;
  }

  void wait() {
    require_no_capture();
    ++*host_syncs_;
    check(cudaStreamSynchronize(stream_), "waiting for the stream");
  }
  std::int64_t host_syncs() const { return *host_syncs_; }

  void fetch(const ConstTensorView& from, std::span<std::byte> to) {
    if (to.empty()) return wait();
    require_no_capture();
    copies_.fetch(from, to);
  }
  void copy_across(const ConstTensorView& from, const TensorView& to) {
    if (from.bytes() == 0) return;
    require_no_capture();
    copies_.copy(from, to, !heaps_.empty());
  }

 private:
  template <typename Body>
  void for_all_memory(Body body) {
    body(memory_);
    for (const auto& heap : heaps_) {
      if (const auto memory = heap.lock()) body(*memory);
    }
  }

  void require_no_capture() const {
    require<DeviceError>(capture_of(stream_) == 0,
                         "this step has to wait for the GPU, which is not possible during capture: "
                         "give the layer bounded sizing");
  }

  CudaOptions options_;
  CUstream_st* own_stream_ = nullptr;
  CUstream_st* stream_ = nullptr;
  CUstream_st* capture_stream_ = nullptr;  // created when first needed
  CUstream_st* capturing_ = nullptr;
  std::uint64_t capture_ = 0;                             // the number of that capture
  CUstream_st* stream_before_ = nullptr;                  // the stream in use before the capture
  std::vector<std::weak_ptr<const PeerCheck>> meetings_;  // recorded during the capture
  Pace pace_;
  DeviceMemory memory_;
  std::vector<std::weak_ptr<DeviceMemory>> heaps_;  // shared with other ranks
  Constants constants_;
  HostCopies copies_{*this, [this] { wait(); }};
  int num_multiprocessors_ = 0;
  bool uses_hopper_kernels_ = false;
  std::shared_ptr<std::atomic<std::int64_t>> host_syncs_ =
      std::make_shared<std::atomic<std::int64_t>>(0);
  std::weak_ptr<EventTimer> timer_;
};

}  // namespace switchyard::cuda
