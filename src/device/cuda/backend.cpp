#include "device/cuda/backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/require.h"
#include "device/cuda/kernels.h"
#include "device/cuda/peer/heap.h"
#include "device/cuda/runtime/constants.h"
#include "device/cuda/runtime/device_memory.h"
#include "device/cuda/runtime/probe.h"
#include "device/cuda/runtime/stage_timer.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

void check(int status, std::string_view what) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) [[likely]] {
    return;
  }
  cudaGetLastError();  // so that it is not met again where it did not happen
  throw DeviceError(fmt::format("CUDA failed at {}: {} ({})", what, cudaGetErrorString(error),
                                cudaGetErrorName(error)));
}

OnGpu::OnGpu(int ordinal) {
  check(cudaGetDevice(&before_), "asking for the thread's GPU");
  if (before_ == ordinal) return;
  check(cudaSetDevice(ordinal), "choosing the GPU");
  has_changed_ = true;
}

OnGpu::~OnGpu() {
  if (has_changed_) cudaSetDevice(before_);
}

namespace {

std::shared_ptr<std::byte> take_pinned(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "taking pinned memory");
  return {static_cast<std::byte*>(memory), [](std::byte* old) { cudaFreeHost(old); }};
}

// Memory of the host that a GPU copies to without the driver's help.
class PinnedBuffer {
 public:
  PinnedBuffer() { at_least(1); }  // taking it may wait, which is best done at once

  // Its bytes; what was there is lost when it grows. What it had before is freed with it alone:
  // freeing waits for the GPU, where a kernel may wait for this very rank.
  std::byte* at_least(std::size_t bytes) {
    if (bytes > size_) {
      size_ = bytes < 65536 ? 65536 : 2 * bytes;
      memory_.push_back(take_pinned(size_));
    }
    return memory_.back().get();
  }

 private:
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::size_t size_ = 0;
};

// What ranks reach of each other, on one stream.
class CudaHeap final : public PeerHeap {
 public:
  CudaHeap(HeapSource source, const Context& context)
      : source_(std::move(source)),
        memory_(std::make_shared<DeviceMemory>(source_.blocks)),
        context_(context) {}

  const std::shared_ptr<DeviceMemory>& memory() const { return memory_; }
  std::byte* base() const override { return source_.base; }
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
  explicit CudaContext(const CudaOptions& options) : options_(options), memory_(options.ordinal) {
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
    uses_hopper_kernels_ = major == 9 && minor == 0 && options.kernels == CudaKernels::best;
  }

  ~CudaContext() override {  // at the end of a program the driver may be gone already
    cudaStreamDestroy(own_stream_);
    for (CUevent_st* const event : passed_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
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
  std::int64_t bytes_held() const { return memory_.bytes_held(); }
  std::uint64_t begin_capture() override {
    require<DeviceError>(capturing_ == nullptr, "a step is captured within a captured step");
    if (stream_ == own_stream_ && capture_stream_ == nullptr) {
      check(cudaStreamCreateWithFlags(&capture_stream_, cudaStreamNonBlocking), "making a stream");
    }
    auto* const stream = stream_ == own_stream_ ? capture_stream_ : stream_;
    // Other threads, whose business this is not, may go on allocating.
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
    num_meetings_ += meetings;
    if (num_meetings_ < kPace || capture_of(stream_) != 0) return;
    num_meetings_ = 0;
    CUevent_st*& event = passed_[next_passed_++ % passed_.size()];
    if (event == nullptr) {
      check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    }
    while (cudaEventQuery(event) == cudaErrorNotReady) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    check(cudaEventRecord(event, stream_), "recording an event");
  }
  std::vector<std::weak_ptr<const PeerCheck>> take_meetings() override {
    return std::exchange(meetings_, {});
  }
  std::shared_ptr<PeerHeap> make_peer_heap(std::span<const int> ordinals) {
    auto heap = std::make_shared<CudaHeap>(make_heap_source(options_.ordinal, ordinals), *this);
    std::erase_if(heaps_, [](const auto& old) { return old.expired(); });
    heaps_.push_back(heap->memory());
    return heap;
  }
  void set_zero(const TensorView& view) override {
    if (view.bytes() == 0) return;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    // A row may be longer than a pitch, which is below 2³¹ bytes.
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
    std::byte* staged = pinned_.at_least(to.size());
    // By a kernel: a copy of the copy engine that waits for this stream may hold up those of other
    // streams, where this one may wait for them.
    const Shape halves{static_cast<std::int64_t>(to.size() / 2)};
    cuda::copy_rows(ConstTensorView(from.data(), Dtype::bf16, halves, 1, nullptr, Memory::gpu),
                    TensorView(staged, Dtype::bf16, halves, 1, nullptr, Memory::gpu), *this);
    wait();
    std::copy_n(staged, to.size(), to.data());
  }

  // Between the host and the GPU, either way; waits. By way of pinned memory, and where there are
  // other ranks, once the stream has come to an end: CUDA copies to and from other memory for one
  // thread at a time, and copies of all streams may take turns. So one that waited for its stream
  // would hold up other threads, for which a kernel on that stream may wait.
  void copy_across(const ConstTensorView& from, const TensorView& to) {
    if (from.bytes() == 0) return;
    require_no_capture();
    constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;
    const bool is_plain = from.is_contiguous() && to.is_contiguous();
    const std::int64_t row_bytes = is_plain ? 1 : from.row_bytes();
    const std::int64_t rows = is_plain ? from.bytes() : from.rows();
    const std::int64_t most_rows = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
    for (std::int64_t first = 0; first < rows; first += most_rows) {
      const std::int64_t count = std::min(most_rows, rows - first);
      copy_piece({from.data() + first * (is_plain ? 1 : from.row_stride_bytes()),
                  is_plain ? count : from.row_stride_bytes()},
                 {to.data() + first * (is_plain ? 1 : to.row_stride_bytes()),
                  is_plain ? count : to.row_stride_bytes()},
                 {is_plain ? 1 : count, is_plain ? count : row_bytes},
                 from.memory() == Memory::host);
    }
  }

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
                  const Rows& rows, bool from_host) {
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    std::byte* const staged = pinned_.at_least(size(rows.count * rows.bytes));
    const auto copy_rows = [&](const std::byte* source, std::int64_t source_stride,
                               std::byte* target, std::int64_t target_stride) {
      for (std::int64_t r = 0; r < rows.count; ++r) {
        std::copy_n(source + r * source_stride, rows.bytes, target + r * target_stride);
      }
    };
    if (!heaps_.empty()) wait();
    if (from_host) copy_rows(from.data, from.stride, staged, rows.bytes);
    check(from_host ? cudaMemcpy2DAsync(to.data, size(to.stride), staged, size(rows.bytes),
                                        size(rows.bytes), size(rows.count), cudaMemcpyHostToDevice,
                                        stream_)
                    : cudaMemcpy2DAsync(staged, size(rows.bytes), from.data, size(from.stride),
                                        size(rows.bytes), size(rows.count), cudaMemcpyDeviceToHost,
                                        stream_),
          "copying between the host and the GPU");
    wait();
    if (!from_host) copy_rows(staged, rows.bytes, to.data, to.stride);
  }

  template <typename Body>
  void for_all_memory(Body body) {
    body(memory_);
    for (const auto& heap : heaps_) {
      if (const auto memory = heap.lock()) body(*memory);
    }
  }

  void require_no_capture() const {
    require<DeviceError>(capture_of(stream_) == 0,
                         "this step has to wait for the GPU, which a captured one cannot: give the "
                         "layer bounded sizing");
  }

  CudaOptions options_;
  CUstream_st* own_stream_ = nullptr;
  CUstream_st* stream_ = nullptr;
  CUstream_st* capture_stream_ = nullptr;  // once one was needed
  CUstream_st* capturing_ = nullptr;
  std::uint64_t capture_ = 0;                             // its number
  CUstream_st* stream_before_ = nullptr;                  // the stream in use before the capture
  std::vector<std::weak_ptr<const PeerCheck>> meetings_;  // in the capture
  static constexpr std::int64_t kPace = 8;
  std::int64_t num_meetings_ = 0;        // since the last event
  std::array<CUevent_st*, 5> passed_{};  // that the stream comes by, every kPace meetings
  std::size_t next_passed_ = 0;
  DeviceMemory memory_;
  std::vector<std::weak_ptr<DeviceMemory>> heaps_;  // that ranks share
  Constants constants_;
  PinnedBuffer pinned_;
  int num_multiprocessors_ = 0;
  bool uses_hopper_kernels_ = false;
  std::shared_ptr<std::atomic<std::int64_t>> host_syncs_ =
      std::make_shared<std::atomic<std::int64_t>>(0);
  std::weak_ptr<EventTimer> timer_;
};

class CudaDevice final : public DeviceBackend {
 public:
  explicit CudaDevice(const CudaOptions& options) : context_(options) {}

  void count_assignments(const CountAssignments& args) const override {
    cuda::count_assignments(args, entered());
  }
  void lay_out(const LayOut& args) const override { cuda::lay_out(args, entered()); }
  void assign_slots(const AssignSlots& args) const override { cuda::assign_slots(args, entered()); }
  void scatter_rows(const ScatterRows& args) const override { cuda::scatter_rows(args, entered()); }
  void gather_rows(const GatherRows& args) const override { cuda::gather_rows(args, entered()); }
  void fill_rows(const FillRows& args) const override { cuda::fill_rows(args, entered()); }
  void dot_rows(const DotRows& args) const override { cuda::dot_rows(args, entered()); }
  void route_tokens(const RouteTokens& args) const override { cuda::route_tokens(args, entered()); }
  void route_tokens_backward(const RouteTokensBackward& args) const override {
    cuda::route_tokens_backward(args, entered());
  }
  void limit_picks(const LimitPicks& args) const override { cuda::limit_picks(args, entered()); }
  void loss_totals(const LossTotals& args) const override { cuda::loss_totals(args, entered()); }
  void loss_slopes(const LossSlopes& args) const override { cuda::loss_slopes(args, entered()); }
  void sum_words(const ConstTensorView& rows, const TensorView& sum) const override {
    cuda::sum_words(rows, sum, entered());
  }
  void count_picks(const RouterSums& sums, const TensorView& statistics) const override {
    cuda::count_picks(sums, statistics, entered());
  }
  void output_scales(const OutputScales& args) const override {
    cuda::output_scales(args, entered());
  }
  void scale_by_expert(const ScaleByExpert& args) const override {
    cuda::scale_by_expert(args, entered());
  }
  void zero_padding(const TensorView& rows, const ConstTensorView& valid) const override {
    cuda::zero_padding(rows, valid, entered());
  }
  void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const override {
    cuda::spoil(failed, views, entered());
  }
  bool reads_tokens(const ExpertsOptions& options,
                    std::span<const ExpertWeights> weights) const override {
    return cuda::reads_tokens(options, weights, context_);
  }
  void experts_forward(const ExpertsForward& args) const override {
    cuda::experts_forward(args, entered());
  }
  void experts_backward(const ExpertsBackward& args) const override {
    cuda::experts_backward(args, entered());
  }
  void shared_forward(const SharedForward& args) const override {
    cuda::shared_forward(args, entered());
  }
  void shared_backward(const SharedBackward& args) const override {
    cuda::shared_backward(args, entered());
  }
  void multiply(std::span<const Matmul> products) const override {
    cuda::multiply(products, entered());
  }
  void meet(const Meet& args) const override {
    const auto entered_context = entered();
    entered_context->note_meeting(args.channel.check);
    cuda::meet(args, entered_context);
  }
  std::shared_ptr<PeerHeap> make_peer_heap(std::span<const int> ordinals) const override {
    return entered()->make_peer_heap(ordinals);
  }
  std::shared_ptr<std::byte> take_shared(std::int64_t bytes) const override {
    const auto gpu = entered();
    auto memory = take_pinned(static_cast<std::size_t>(bytes));
    std::fill_n(memory.get(), bytes, std::byte{0});
    return memory;
  }
  void split(std::int64_t /*count*/,
             const std::function<void(std::int64_t, std::int64_t)>& /*piece*/) const override {
    throw Unsupported("Device::parallel_for runs functions of the host, which a GPU cannot");
  }

  Memory memory() const override { return Memory::gpu; }
  int ordinal() const override { return context_.ordinal(); }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return entered()->take(shape, dtype);
  }
  void set_zero(const TensorView& view) const override { entered()->set_zero(view); }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    if (from.memory() == Memory::gpu && to.memory() == Memory::gpu) {
      cuda::copy_rows(from, to, entered());
    } else {
      entered()->copy_across(from, to);
    }
  }
  void upload(std::span<const std::byte> from, const TensorView& to) const override {
    entered()->upload(from, to.data());
  }
  void fetch(const ConstTensorView& from, std::span<std::byte> to) const override {
    entered()->fetch(from, to);
  }
  std::int64_t bytes_held() const override { return context_.bytes_held(); }
  int num_threads() const override { return 1; }

  Stream stream() const override { return {context_.stream()}; }
  void set_stream(Stream stream) const override {
    context_.set_stream(static_cast<CUstream_st*>(stream.handle));
  }
  void wait() const override { entered()->wait(); }
  void synchronize() const override {
    const OnGpu gpu(ordinal());
    check(cudaStreamSynchronize(context_.stream()), "waiting for the stream");
  }
  std::int64_t host_syncs() const override { return context_.host_syncs(); }
  std::shared_ptr<StageTimer> time_stages() const override { return entered()->time_stages(); }

  Context& context() const { return context_; }

 private:
  // The context, while the calling thread is on its GPU.
  class Entered {
   public:
    explicit Entered(CudaContext& context) : gpu_(context.ordinal()), context_(context) {}
    operator CudaContext&() const { return context_; }
    CudaContext* operator->() const { return &context_; }

   private:
    OnGpu gpu_;
    CudaContext& context_;
  };

  Entered entered() const { return Entered(context_); }

  // A device is used by one thread at a time; what it works with is no part of what it is.
  mutable CudaContext context_;
};

}  // namespace

std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options) {
  const auto reason = reason_against(options.ordinal);
  require<Unsupported>(reason.empty(), "GPU {} cannot be used: {}", options.ordinal, reason);
  const OnGpu gpu(options.ordinal);
  return std::make_shared<const CudaDevice>(options);
}

Context& context_of(const Device& device) {
  const auto* gpu = dynamic_cast<const CudaDevice*>(&backend_of(device));
  require(gpu != nullptr, "the device is no GPU");
  return gpu->context();
}

}  // namespace switchyard::cuda
