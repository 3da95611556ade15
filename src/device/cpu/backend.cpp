// SPDX-License-Identifier: Apache-2.0
// The CPU as a device.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "core/padding.h"
#include "core/require.h"
#include "core/row_bytes.h"
#include "device/cpu/kernels.h"
#include "device/cpu/peer/heap.h"
#include "device/device_backend.h"
#include "switchyard/device.h"

namespace switchyard {
namespace {

template <typename T>
void fill_rows_with(const TensorView& view, T value) {
  for (std::int64_t r = 0; r < view.rows(); ++r) {
    std::ranges::fill(view.slice(r, r + 1).span<T>(), value);
  }
}

void fill_with_nan(const TensorView& view) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (view.dtype() == Dtype::bf16) return fill_rows_with(view, to_bfloat16(kNan));
  fill_rows_with(view, kNan);
}

class CpuDevice final : public DeviceBackend {
 public:
  explicit CpuDevice(const CpuOptions& options) : workers_(options.num_threads, options.cores) {}

  void narrow_ids(const NarrowIds& args) const override { cpu::narrow_ids(args); }
  void count_assignments(const CountAssignments& args) const override {
    cpu::count_assignments(args);
  }
  void lay_out(const LayOut& args) const override { cpu::lay_out(args); }
  void assign_slots(const AssignSlots& args) const override { cpu::assign_slots(args); }
  void scatter_rows(const ScatterRows& args) const override { cpu::scatter_rows(args, workers_); }
  void gather_rows(const GatherRows& args) const override { cpu::gather_rows(args, workers_); }
  void fill_rows(const FillRows& args) const override { cpu::fill_rows(args, workers_); }
  void dot_rows(const DotRows& args) const override { cpu::dot_rows(args, workers_); }
  void route_tokens(const RouteTokens& args) const override {
    cpu::route_tokens(args, workers_, memory_);
  }
  void route_tokens_backward(const RouteTokensBackward& args) const override {
    cpu::route_tokens_backward(args, workers_, memory_);
  }
  void limit_picks(const LimitPicks& args) const override { cpu::limit_picks(args); }
  void loss_totals(const LossTotals& args) const override { cpu::loss_totals(args); }
  void loss_slopes(const LossSlopes& args) const override { cpu::loss_slopes(args); }
  void sum_words(const ConstTensorView& rows, const TensorView& sum) const override {
    cpu::sum_words(rows, sum);
  }
  void count_picks(const RouterSums& sums, const TensorView& statistics) const override {
    cpu::count_picks(sums, statistics);
  }
  void output_scales(const OutputScales& args) const override { cpu::output_scales(args); }
  void scale_by_expert(const ScaleByExpert& args) const override { cpu::scale_by_expert(args); }
  void zero_padding(const TensorView& rows, const ConstTensorView& valid) const override {
    for (std::int64_t t = 0; t < rows.rows(); ++t) {
      if (!is_valid(valid, t)) set_zero(rows.slice(t, t + 1));
    }
  }
  void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const override {
    if (*failed == 0) return;
    for (const TensorView& view : views) fill_with_nan(view);
  }
  void experts_forward(const ExpertsForward& args) const override {
    cpu::experts_forward(args, workers_);
  }
  void experts_backward(const ExpertsBackward& args) const override {
    cpu::experts_backward(args, workers_, memory_);
  }
  void shared_forward(const SharedForward& args) const override {
    cpu::shared_forward(args, workers_);
  }
  void shared_backward(const SharedBackward& args) const override {
    cpu::shared_backward(args, workers_, memory_);
  }
  void multiply(std::span<const Matmul> products) const override {
    cpu::multiply(products, workers_);
  }
  void split(std::int64_t count,
             const std::function<void(std::int64_t, std::int64_t)>& piece) const override {
    workers_.split(count, piece);
  }
  void meet(const Meet& args) const override { cpu::meet(args); }
  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const override {
    auto heap = options.announce != nullptr ? cpu::make_shared_heap(options.announce)
                                            : cpu::make_peer_heap();
    std::erase_if(heaps_, [](const auto& old) { return old.expired(); });
    heaps_.push_back(heap);
    return heap;
  }
  std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) const override {
    return cpu::reach_heap(reserved_bytes);
  }
  std::shared_ptr<void> share_host_memory(std::span<std::byte> /*memory*/) const override {
    return nullptr;
  }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return memory_.take(shape, dtype);
  }
  void set_zero(const TensorView& view) const override { zero_rows(view); }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    copy_rows(from, to);
  }
  ConstTensorView constant(std::span<const std::int32_t> values) const override {
    const auto found = constants_.insert({values.begin(), values.end()}).first;
    return {found->data(), {static_cast<std::int64_t>(found->size())}};
  }
  void upload(std::span<const std::byte> from, const TensorView& to) const override {
    std::ranges::copy(from, to.data());
  }
  void fetch(const ConstTensorView& from, std::span<std::byte> to) const override {
    std::copy_n(from.data(), to.size(), to.data());
  }
  std::int64_t bytes_held() const override {
    std::int64_t bytes = memory_.bytes_held() + workers_.scratch_bytes();
    for (const auto& known : heaps_) {
      if (const auto heap = known.lock()) bytes += heap->bytes_held();
    }
    return bytes;
  }
  int num_threads() const override { return workers_.num_threads(); }

 private:
  // Working state that const calls change. Only one thread at a time uses a device.
  mutable cpu::Workers workers_;
  mutable MemoryCache memory_;
  mutable std::vector<std::weak_ptr<PeerHeap>> heaps_;
  mutable std::set<std::vector<std::int32_t>> constants_;
};

}  // namespace

Device::Device() : Device(cpu({})) {}

Device Device::cpu(const CpuOptions& options) {
  return Device(std::make_shared<const CpuDevice>(options));
}

}  // namespace switchyard
