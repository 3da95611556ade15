// SPDX-License-Identifier: Apache-2.0
#include "peer/device_collectives.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "comm/gather_numbers.h"
#include "peer/elements.h"
#include "peer/peer_staging.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// The staging that a communicator keeps for a device. `staging` is null if the ranks cannot reach
// each other's memory.
struct KeptStaging final : KeptObject {
  KeptStaging(Device of_device, std::int64_t of_number)
      : device(std::move(of_device)), number(of_number) {}

  Device device;
  std::int64_t number;  // 1-based among the communicator's objects; equal on all ranks
  std::shared_ptr<const PeerStaging> staging;
};

std::shared_ptr<KeptStaging> find_kept(Communicator& comm, const Device& device) {
  for (const auto& object : KeptObjects::of(comm)) {
    auto kept = std::dynamic_pointer_cast<KeptStaging>(object);
    if (kept != nullptr && &backend_of(kept->device) == &backend_of(device)) return kept;
  }
  return nullptr;
}

bool all_have(Communicator& comm, std::int64_t number) {
  const Tensor numbers = gather_numbers(comm, {&number, 1});
  return std::ranges::all_of(numbers.span<std::int64_t>(),
                             [&](std::int64_t other) { return other == number && number != 0; });
}

// Returns the staging kept for `device`, creating it if any rank lacks it. The new staging replaces
// any other: a rank uses one device, and the old buffers would only hold memory.
std::shared_ptr<const PeerStaging> staging_of(Communicator& comm, const Device& device) {
  const auto known = find_kept(comm, device);
  if (all_have(comm, known != nullptr ? known->number : 0)) return known->staging;
  auto& objects = KeptObjects::of(comm);
  std::erase_if(objects, [](const auto& object) {
    return dynamic_cast<const KeptStaging*>(object.get()) != nullptr;
  });
  auto kept = std::make_shared<KeptStaging>(device, ObjectIds::next(comm) + 1);
  try {
    kept->staging =
        std::make_shared<const PeerStaging>(comm, device, DeviceCollectives::kStagingBytes);
  } catch (const Unsupported&) {  // thrown on all ranks
  }
  objects.push_back(kept);
  return kept->staging;
}

template <typename View>
std::int64_t most_elements(std::span<const std::vector<View>> lists) {
  std::int64_t most = 0;
  for (const auto& list : lists) most = std::max(most, Elements<View>(list).count());
  return most;
}

// Copies within the device, for a communicator with a single rank.
void copy_elements(const DeviceBackend& device, const Elements<ConstTensorView>& from,
                   const Elements<TensorView>& to, Dtype dtype) {
  if (from.count() == 0) return;
  const TensorView between = device.take({from.count()}, dtype);
  from.read(device, 0, from.count(), between);
  to.write(device, 0, to.count(), between);
}

template <typename View>
View columns_of(const View& matrix, std::int64_t first, std::int64_t count) {
  return {matrix.data() + first * size_of(matrix.dtype()),
          matrix.dtype(),
          {matrix.rows(), count},
          matrix.row_stride(),
          matrix.owner(),
          matrix.memory()};
}

}  // namespace

DeviceCollectives::DeviceCollectives(Communicator& comm, const Device& device)
    : comm_(comm), device_(device), staging_bytes_(kStagingBytes) {
  if (!is_on_host() && comm.size() > 1) peers_ = staging_of(comm, device);
}

DeviceCollectives::DeviceCollectives(Communicator& comm, const Device& device, Way way,
                                     std::int64_t staging_bytes)
    : comm_(comm), device_(device), staging_bytes_(staging_bytes) {
  if (way == Way::communicator) return;
  peers_ = std::make_shared<const PeerStaging>(comm, device, staging_bytes);
}

DeviceCollectives::~DeviceCollectives() = default;

bool DeviceCollectives::uses_peers(Dtype dtype) const {
  return peers_ != nullptr && PeerStaging::adds(dtype);
}

// Host tensors are exchanged all at once, since they need no copies between devices.
std::int64_t DeviceCollectives::staged_elements(std::int64_t most, std::int64_t num_parts,
                                                Dtype dtype) const {
  const auto room = staging_bytes_ / size_of(dtype) / num_parts;
  return std::max<std::int64_t>(1, is_on_host() ? most : std::min(most, room));
}

void DeviceCollectives::all_gather(const ConstTensorView& own,
                                   std::span<const std::vector<TensorView>> all) const {
  if (peers_ != nullptr) return peers_->all_gather(own, all);
  const DeviceBackend& device = backend_of(device_);
  const Elements<ConstTensorView> mine({&own, 1});
  if (is_alone_on_gpu()) {
    return copy_elements(device, mine, Elements<TensorView>(all.front()), own.dtype());
  }
  const auto most = most_elements(all);
  const auto room = staged_elements(most, comm_.size(), own.dtype());
  std::int64_t first = 0;
  do {  // at least once, so that ranks that disagree about sizes find out
    const auto count = std::min(room, most - first);
    const auto in_piece = [&](std::int64_t of) {
      return std::clamp<std::int64_t>(of - first, 0, count);
    };
    Tensor sent = Tensor::zeros({1, count}, own.dtype());  // shorter ranks pad with zeros
    mine.read(device, first, in_piece(mine.count()), sent);
    Tensor gathered({comm_.size(), count}, own.dtype());
    comm_.all_gather(sent, gathered);
    for (std::size_t r = 0; r < all.size(); ++r) {
      const Elements<TensorView> list(all[r]);
      const auto row = static_cast<std::int64_t>(r);
      list.write(device, first, in_piece(list.count()), gathered.view().slice(row, row + 1));
    }
  } while ((first += room) < most);
}

void DeviceCollectives::reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                                       const TensorView& sum) const {
  if (uses_peers(sum.dtype())) return peers_->reduce_scatter(parts, sum);
  const DeviceBackend& device = backend_of(device_);
  const Elements<TensorView> mine({&sum, 1});
  if (is_alone_on_gpu()) {
    return copy_elements(device, Elements<ConstTensorView>(parts.front()), mine, sum.dtype());
  }
  const auto most = most_elements(parts);
  const auto room = staged_elements(most, comm_.size(), sum.dtype());
  std::int64_t first = 0;
  do {
    const auto count = std::min(room, most - first);
    const auto in_piece = [&](std::int64_t of) {
      return std::clamp<std::int64_t>(of - first, 0, count);
    };
    Tensor sent = Tensor::zeros({comm_.size(), count}, sum.dtype());
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const Elements<ConstTensorView> list(parts[r]);
      const auto row = static_cast<std::int64_t>(r);
      list.read(device, first, in_piece(list.count()), sent.view().slice(row, row + 1));
    }
    Tensor added({1, count}, sum.dtype());
    comm_.reduce_scatter(sent, added);
    mine.write(device, first, in_piece(mine.count()), added);
  } while ((first += room) < most);
}

void DeviceCollectives::all_reduce(std::span<const TensorView> values) const {
  const Elements<TensorView> all(values);
  if (all.count() == 0 || is_alone_on_gpu()) return;
  const Dtype dtype = values.front().dtype();
  if (uses_peers(dtype)) return peers_->all_reduce(values);
  const DeviceBackend& device = backend_of(device_);
  const std::int64_t room = std::max<std::int64_t>(1, staging_bytes_ / size_of(dtype));
  for (std::int64_t first = 0; first < all.count(); first += room) {
    const auto count = std::min(room, all.count() - first);
    if (is_on_host()) {
      const TensorView together = all.lying_together(first, count);
      if (together.data() != nullptr) {
        comm_.all_reduce(together);
        continue;
      }
    }
    Tensor staged({count}, dtype);
    all.read(device, first, count, staged);
    comm_.all_reduce(staged);
    all.write(device, first, count, staged);
  }
}

// Exchanges as many columns of all rows at a time as fit the staging size, so that ranks with few
// rows, or none, take part in every exchange.
void DeviceCollectives::all_to_all(const ConstTensorView& send,
                                   std::span<const std::int64_t> send_rows, const TensorView& recv,
                                   std::span<const std::int64_t> recv_rows) const {
  if (is_on_host()) return comm_.all_to_all(send, send_rows, recv, recv_rows);
  if (is_alone_on_gpu()) return device_.copy(send, recv);
  std::int64_t most_rows = std::max<std::int64_t>({1, send.rows(), recv.rows()});
  comm_.all_reduce(TensorView(&most_rows, {1}), ReduceOp::max);
  const auto columns = send.shape().row_elements();
  const auto room = std::max<std::int64_t>(1, staging_bytes_ / size_of(send.dtype()) / most_rows);
  for (std::int64_t first = 0; first < columns; first += room) {
    const auto count = std::min(room, columns - first);
    const Tensor sent = device_.to_host(columns_of(send, first, count));
    Tensor received({recv.rows(), count}, recv.dtype());
    comm_.all_to_all(sent, send_rows, received, recv_rows);
    device_.copy(received, columns_of(recv, first, count));
  }
}

}  // namespace switchyard
