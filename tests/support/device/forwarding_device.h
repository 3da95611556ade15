// SPDX-License-Identifier: Apache-2.0
// A device that forwards every call to another one, for tests that override some of them.
#pragma once

#include <memory>
#include <span>

#include "device/device_backend.h"

namespace switchyard::testing {

class ForwardingDevice : public DeviceBackend {
 public:
  explicit ForwardingDevice(Device base) : base_(std::move(base)) {}

  void narrow_ids(const NarrowIds& args) const override { base().narrow_ids(args); }
  void count_assignments(const CountAssignments& args) const override {
    base().count_assignments(args);
  }
  void lay_out(const LayOut& args) const override { base().lay_out(args); }
  void assign_slots(const AssignSlots& args) const override { base().assign_slots(args); }
  void scatter_rows(const ScatterRows& args) const override { base().scatter_rows(args); }
  void gather_rows(const GatherRows& args) const override { base().gather_rows(args); }
  void fill_rows(const FillRows& args) const override { base().fill_rows(args); }
  void dot_rows(const DotRows& args) const override { base().dot_rows(args); }
  void route_tokens(const RouteTokens& args) const override { base().route_tokens(args); }
  void route_tokens_backward(const RouteTokensBackward& args) const override {
    base().route_tokens_backward(args);
  }
  void limit_picks(const LimitPicks& args) const override { base().limit_picks(args); }
  void loss_totals(const LossTotals& args) const override { base().loss_totals(args); }
  void loss_slopes(const LossSlopes& args) const override { base().loss_slopes(args); }
  void sum_words(const ConstTensorView& rows, const TensorView& sum) const override {
    base().sum_words(rows, sum);
  }
  void count_picks(const RouterSums& sums, const TensorView& statistics) const override {
    base().count_picks(sums, statistics);
  }
  void output_scales(const OutputScales& args) const override { base().output_scales(args); }
  void scale_by_expert(const ScaleByExpert& args) const override { base().scale_by_expert(args); }
  void zero_padding(const TensorView& rows, const ConstTensorView& valid) const override {
    base().zero_padding(rows, valid);
  }
  void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const override {
    base().spoil(failed, views);
  }
  bool reads_tokens(const ExpertsOptions& options) const override {
    return base().reads_tokens(options);
  }
  void experts_forward(const ExpertsForward& args) const override { base().experts_forward(args); }
  void experts_backward(const ExpertsBackward& args) const override {
    base().experts_backward(args);
  }
  void shared_forward(const SharedForward& args) const override { base().shared_forward(args); }
  void shared_backward(const SharedBackward& args) const override { base().shared_backward(args); }
  void multiply(std::span<const Matmul> products) const override { base().multiply(products); }
  void split(std::int64_t count,
             const std::function<void(std::int64_t, std::int64_t)>& piece) const override {
    base().split(count, piece);
  }

  void meet(const Meet& args) const override { base().meet(args); }
  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const override {
    return base().make_peer_heap(options);
  }
  std::shared_ptr<ReachedHeap> reach_heap(std::int64_t reserved_bytes) const override {
    return base().reach_heap(reserved_bytes);
  }
  std::shared_ptr<void> share_host_memory(std::span<std::byte> memory) const override {
    return base().share_host_memory(memory);
  }
  DeviceIdentity identity() const override { return base().identity(); }
  std::string reason_against_reaching(const DeviceIdentity& other) const override {
    return base().reason_against_reaching(other);
  }

  Memory memory() const override { return base().memory(); }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return base().take(shape, dtype);
  }
  void set_zero(const TensorView& view) const override { base().set_zero(view); }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    base().copy(from, to);
  }
  ConstTensorView constant(std::span<const std::int32_t> values) const override {
    return base().constant(values);
  }
  void upload(std::span<const std::byte> from, const TensorView& to) const override {
    base().upload(from, to);
  }
  void fetch(const ConstTensorView& from, std::span<std::byte> to) const override {
    base().fetch(from, to);
  }
  std::int64_t bytes_held() const override { return base().bytes_held(); }
  int num_threads() const override { return base().num_threads(); }

  Stream stream() const override { return base().stream(); }
  void set_stream(Stream stream) const override { base().set_stream(stream); }
  void synchronize() const override { base().synchronize(); }
  std::int64_t host_syncs() const override { return base().host_syncs(); }
  std::shared_ptr<StageTimer> time_stages() const override { return base().time_stages(); }
  int ordinal() const override { return base().ordinal(); }

 protected:
  const DeviceBackend& base() const { return backend_of(base_); }

 private:
  Device base_;
};

}  // namespace switchyard::testing
