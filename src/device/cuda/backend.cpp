// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/backend.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "core/require.h"
#include "device/cuda/grouped_gemm.h"
#include "device/cuda/kernels.h"
#include "device/cuda/peer/heap.h"
#include "device/cuda/runtime/cuda_context.h"
#include "device/cuda/runtime/probe.h"
#include "device/device_backend.h"

namespace switchyard::cuda {

namespace {

// Queried when a device is made, while the driver still answers.
std::atomic<bool> uses_mps = false;

// True for errors after which CUDA no longer works in this process.
bool is_final(cudaError_t error) {
  return error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure ||
         error == cudaErrorMpsClientTerminated || error == cudaErrorMpsRpcFailure;
}

}  // namespace

void check(int status, std::string_view what) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) [[likely]] {
    return;
  }
  cudaGetLastError();  // clears the error, so that no later call reports it
  throw DeviceError(fmt::format(
      "CUDA failed at {}: {} ({}){}", what, cudaGetErrorString(error), cudaGetErrorName(error),
      is_final(error) && uses_mps ? "; under MPS, killing one process ends all others on its GPU: "
                                    "see which rank ended first"
                                  : ""));
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

class CudaDevice final : public DeviceBackend {
 public:
  explicit CudaDevice(const CudaOptions& options) : context_(options) {}

  void narrow_ids(const NarrowIds& args) const override { cuda::narrow_ids(args, entered()); }
  void count_assignments(const CountAssignments& args) const override {
    cuda::count_assignments(args, entered());
  }
  void lay_out(const LayOut& args) const override { cuda::lay_out(args, entered()); }
  void assign_slots(const AssignSlots& args) const override { cuda::assign_slots(args, entered()); }
  void plan_alone(const PlanAlone& args) const override {
    if (!cuda::plan_alone(args, entered())) DeviceBackend::plan_alone(args);
  }
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
  bool reads_tokens(const ExpertsOptions& options) const override {
    return cuda::hopper::reads_tokens(options, context_);
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
  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const override {
    return entered()->make_peer_heap(options);
  }
  std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) const override {
    return cuda::reach_heap(ordinal(), reserved_bytes);
  }
  std::shared_ptr<void> share_host_memory(std::span<std::byte> memory) const override {
    const auto gpu = entered();
    check(cudaHostRegister(memory.data(), memory.size(),
                           cudaHostRegisterMapped | cudaHostRegisterPortable),
          "letting GPUs reach memory of the host");
    return {memory.data(), [](void* registered) { cudaHostUnregister(registered); }};
  }
  DeviceIdentity identity() const override { return identity_of(ordinal()); }
  std::string reason_against_reaching(const DeviceIdentity& other) const override {
    return cuda::reason_against_reaching(ordinal(), other);
  }
  void split(std::int64_t /*count*/,
             const std::function<void(std::int64_t, std::int64_t)>& /*piece*/) const override {
    throw Unsupported("Device::parallel_for runs on the host: use a CPU device");
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
  ConstTensorView constant(std::span<const std::int32_t> values) const override {
    const void* const table = entered()->constant(std::as_bytes(values));
    return {static_cast<const std::int32_t*>(table),
            {static_cast<std::int64_t>(values.size())},
            Memory::gpu};
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
  void synchronize() const override {
    const OnGpu gpu(ordinal());
    check(cudaStreamSynchronize(context_.stream()), "waiting for the stream");
  }
  std::int64_t host_syncs() const override { return context_.host_syncs(); }
  std::shared_ptr<StageTimer> time_stages() const override { return entered()->time_stages(); }

  Context& context() const { return context_; }

 private:
  // Gives access to the context and keeps its GPU selected for the calling thread.
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

  // Mutable: only one thread uses a device at a time, and the context is not part of its value.
  mutable CudaContext context_;
};

}  // namespace

std::shared_ptr<const DeviceBackend> make_device(const CudaOptions& options) {
  const auto reason = reason_against(options.ordinal);
  require<Unsupported>(reason.empty(), "GPU {} cannot be used: {}", options.ordinal, reason);
  const OnGpu gpu(options.ordinal);
  if (is_under_mps(options.ordinal)) uses_mps = true;
  return std::make_shared<const CudaDevice>(options);
}

Context& context_of(const Device& device) {
  const auto* gpu = dynamic_cast<const CudaDevice*>(&backend_of(device));
  require(gpu != nullptr, "the device is not a GPU");
  return gpu->context();
}

}  // namespace switchyard::cuda
