// SPDX-License-Identifier: Apache-2.0
// A device that computes on the CPU but claims that its tensors are in GPU memory.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "support/device/forwarding_device.h"
#include "support/elsewhere.h"
#include "switchyard/error.h"

namespace switchyard::testing {

class PretendGpu : public ForwardingDevice {
 public:
  enum class Peers {
    // Other ranks can reach its memory. So can the host, although the views do not say so.
    reached,
    // Other ranks cannot reach its memory. Its pointers are invalid on the host, so dereferencing
    // one directly crashes. It can only allocate, clear and copy tensors.
    apart,
  };

  explicit PretendGpu(Peers peers) : ForwardingDevice(Device()), peers_(peers) {}
  static Device device(Peers peers) { return Device(std::make_shared<PretendGpu>(peers)); }

  int num_heaps() const { return num_heaps_; }

  Memory memory() const override { return Memory::gpu; }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    return pretended(base().take(shape, dtype));
  }
  void set_zero(const TensorView& view) const override { base().set_zero(real(view)); }
  void copy(const ConstTensorView& from, const TensorView& to) const override {
    base().copy(real(from), real(to));
  }
  ConstTensorView constant(std::span<const std::int32_t> values) const override {
    return moved(base().constant(values), Memory::gpu);
  }
  void upload(std::span<const std::byte> from, const TensorView& to) const override {
    base().upload(from, real(to));
  }
  void fetch(const ConstTensorView& from, std::span<std::byte> to) const override {
    base().fetch(real(from), to);
  }
  void spoil(const std::uint32_t* failed, std::span<const TensorView> views) const override {
    std::vector<TensorView> of_host;
    for (const TensorView& view : views) of_host.push_back(real(view));
    base().spoil(failed, of_host);
  }
  void meet(const Meet& args) const override {
    base().meet({.channel = args.channel,
                 .meeting = args.meeting,
                 .detail = args.detail,
                 .words = args.words,
                 .record = real(args.record),
                 .gathered = real(args.gathered),
                 .addresses = real(args.addresses),
                 .cleared = real(args.cleared)});
  }
  std::shared_ptr<PeerHeap> make_peer_heap(const PeerHeapOptions& options) const override {
    if (peers_ == Peers::apart) throw Unsupported("no rank reaches this memory");
    ++num_heaps_;
    return std::make_shared<Heap>(*this, base().make_peer_heap(options));
  }

 private:
  class Heap final : public PeerHeap {
   public:
    Heap(const PretendGpu& device, std::shared_ptr<PeerHeap> heap)
        : device_(device), heap_(std::move(heap)) {}
    std::byte* base() const override { return heap_->base(); }
    std::int64_t reserved_bytes() const override { return heap_->reserved_bytes(); }
    TensorView take(const Shape& shape, Dtype dtype) override {
      return device_.pretended(heap_->take(shape, dtype));
    }
    bool holds(const ConstTensorView& view) const override { return heap_->holds(view); }
    std::int64_t bytes_held() const override { return heap_->bytes_held(); }

   private:
    const PretendGpu& device_;
    std::shared_ptr<PeerHeap> heap_;
  };

  // Maps to or from an address that is never valid.
  template <typename Byte>
  Byte* other_side(Byte* data) const {
    constexpr std::uintptr_t kBeyond = std::uintptr_t{1} << 62;
    if (peers_ == Peers::reached || data == nullptr) return data;
    return std::bit_cast<Byte*>(std::bit_cast<std::uintptr_t>(data) ^ kBeyond);
  }
  template <typename Byte>
  BasicTensorView<Byte> moved(const BasicTensorView<Byte>& view, Memory memory) const {
    return {other_side(view.data()), view.dtype(), view.shape(),
            view.row_stride(),       view.owner(), memory};
  }
  TensorView pretended(const TensorView& view) const { return moved(view, Memory::gpu); }
  template <typename Byte>
  BasicTensorView<Byte> real(const BasicTensorView<Byte>& view) const {
    return view.memory() == Memory::host ? view : moved(view, Memory::host);
  }

  Peers peers_;
  mutable std::atomic<int> num_heaps_ = 0;
};

}  // namespace switchyard::testing
