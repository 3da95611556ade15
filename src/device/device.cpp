// SPDX-License-Identifier: Apache-2.0
// The parts of Device that are the same for every backend.
#include "switchyard/device.h"

#include "core/overlap.h"
#include "core/require.h"
#include "core/row_bytes.h"
#include "device/cuda/runtime/probe.h"
#include "device/device_backend.h"

namespace switchyard {

Device::Device(std::shared_ptr<const DeviceBackend> backend) : backend_(std::move(backend)) {
  require(backend_ != nullptr, "a device's backend is a null pointer");
}

Device Device::cuda(const CudaOptions& options) { return Device(cuda::make_device(options)); }

Memory Device::memory() const { return backend_->memory(); }
int Device::num_threads() const { return backend_->num_threads(); }
std::int64_t Device::bytes_held() const { return backend_->bytes_held(); }

Tensor Device::empty(const Shape& shape, Dtype dtype) const {
  return Tensor::of(backend_->take(shape, dtype));
}

Tensor Device::copy_of(const ConstTensorView& from) const {
  Tensor result = empty(from.shape(), from.dtype());
  copy(from, result);
  return result;
}

Tensor Device::to_host(const ConstTensorView& from) const {
  Tensor result(from.shape(), from.dtype());
  copy(from, result);
  return result;
}

void Device::copy(const ConstTensorView& from, const TensorView& to) const {
  require(from.shape() == to.shape() && from.dtype() == to.dtype(),
          "a copy of {} {} does not fit into {} {}", name_of(from.dtype()), from.shape(),
          name_of(to.dtype()), to.shape());
  const auto reaches = [&](Memory place) { return place == Memory::host || place == memory(); };
  require(reaches(from.memory()) && reaches(to.memory()),
          "the CPU's device cannot copy from {} to {} memory; use the GPU's device",
          name_of(from.memory()), name_of(to.memory()));
  require_apart(from, to, "the source and the destination of a copy");
  if (from.shape().num_elements() == 0) return;
  if (from.memory() == Memory::host && to.memory() == Memory::host) return copy_rows(from, to);
  backend_->copy(from, to);
}

void Device::set_zero(const TensorView& view) const {
  require(view.memory() == memory(), "{} memory cannot be set to zero by a device of {} memory",
          name_of(view.memory()), name_of(memory()));
  backend_->set_zero(view);
}

Stream Device::stream() const { return backend_->stream(); }
void Device::set_stream(Stream stream) const { backend_->set_stream(stream); }
void Device::synchronize() const { backend_->synchronize(); }
std::int64_t Device::host_syncs() const { return backend_->host_syncs(); }

void Device::parallel_for(
    std::int64_t count,
    const std::function<void(std::int64_t first, std::int64_t last)>& piece) const {
  require<Unsupported>(memory() == Memory::host, "parallel_for runs on CPUs, not on a GPU");
  require(count >= 0, "count ({}) must not be negative", count);
  require(piece != nullptr, "piece is empty: pass a function");
  if (count > 0) backend_->split(count, piece);
}

}  // namespace switchyard
