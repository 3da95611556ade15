// SPDX-License-Identifier: Apache-2.0
#include "soak/killing_communicator.h"

#include <numeric>

namespace switchyard::cli {
namespace {

// There is no one-byte dtype, so bytes are moved as elements of two.
constexpr std::int64_t kUnitBytes = 2;

TensorView view_of(std::byte* data, std::int64_t rows, std::int64_t row_bytes,
                   const std::shared_ptr<const void>& owner) {
  const std::int64_t columns = row_bytes / kUnitBytes;
  std::shared_ptr<std::byte> shared;
  if (owner != nullptr) {
    shared = std::const_pointer_cast<std::byte>(std::static_pointer_cast<const std::byte>(owner));
  }
  return {data, Dtype::bf16, {rows, columns}, columns, shared};
}

std::int64_t sum_of(std::span<const std::int64_t> rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

}  // namespace

KillingCommunicator::KillingCommunicator(Communicator& inner,
                                         std::function<void(std::int64_t)> before)
    : Communicator(inner.rank(), inner.size(), inner.timeout()),
      inner_(inner),
      before_(std::move(before)) {}

MappedBuffers* KillingCommunicator::mapped_buffers() {
  return inner_.mapped_buffers() == nullptr ? nullptr : this;
}

std::vector<std::vector<TensorView>> KillingCommunicator::map(std::span<const TensorView> views) {
  std::vector<std::vector<TensorView>> result;
  run_collective("map", "", [&] {
    count();
    result = inner_.mapped_buffers()->map(views);
  });
  return result;
}

void KillingCommunicator::phase_barrier() {
  run_collective("phase_barrier", "", [&] {
    count();
    inner_.mapped_buffers()->phase_barrier();
  });
}

void KillingCommunicator::do_all_to_all(const Rows& send, const Rows& recv,
                                        std::int64_t row_bytes) {
  count();
  inner_.all_to_all(view_of(send.data, sum_of(send.rows), row_bytes, send.owner), send.rows,
                    view_of(recv.data, sum_of(recv.rows), row_bytes, recv.owner), recv.rows);
}

void KillingCommunicator::do_all_gather(const Bytes& send, const Bytes& recv) {
  count();
  inner_.all_gather(view_of(send.data, 1, send.bytes, send.owner),
                    view_of(recv.data, size(), recv.bytes / size(), recv.owner));
}

void KillingCommunicator::do_broadcast(const Bytes& values, int root) {
  count();
  inner_.broadcast(view_of(values.data, 1, values.bytes, values.owner), root);
}

void KillingCommunicator::do_barrier() {
  count();
  inner_.barrier();
}

std::unique_ptr<Communicator> KillingCommunicator::do_split(int color, int key) {
  count();
  return inner_.split(color, key);
}

void KillingCommunicator::do_abort(const std::string& reason, const std::vector<int>& culprits) {
  abort_wrapped(inner_, reason, culprits);
}

}  // namespace switchyard::cli
