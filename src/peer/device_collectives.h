// SPDX-License-Identifier: Apache-2.0
// Collectives on tensors in any device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/tensor.h"

namespace switchyard {

class PeerStaging;

// Host tensors go through the communicator. GPU tensors go through peer memory if the ranks can
// reach each other's: the GPUs write to and read from staging buffers, and no host waits for them.
// Otherwise the hosts stage them in pieces of bounded size, and wait. Both paths give the same
// bits, except for NaNs, which a GPU writes with its own payload.
//
// A list of tensors has one dtype and counts as the concatenation of their elements; rows may be
// strided. All ranks must pass the same numbers of elements; a mismatch throws CommunicationError.
class DeviceCollectives {
 public:
  // Lets tests choose the path.
  enum class Way { communicator, peer_memory };
  static constexpr std::int64_t kStagingBytes = std::int64_t{32} << 20;

  // Collective if the device is a GPU. The first call for a communicator and device creates the
  // staging buffers, which the communicator keeps; later calls cost one small exchange between the
  // hosts. Both arguments must outlive this object.
  DeviceCollectives(Communicator& comm, const Device& device);
  // Collective for `peer_memory`. Throws Unsupported on all ranks if they cannot reach each other's
  // memory.
  DeviceCollectives(Communicator& comm, const Device& device, Way way,
                    std::int64_t staging_bytes = kStagingBytes);
  ~DeviceCollectives();

  // Fills all[r] with the tensor that rank r passes as `own`.
  void all_gather(const ConstTensorView& own, std::span<const std::vector<TensorView>> all) const;
  // parts[r] is this rank's contribution to what rank r receives. Parts are added in rank order;
  // bf16 is summed in f32 and rounded once, as in Communicator::reduce_scatter.
  void reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                      const TensorView& sum) const;
  // Like Communicator::all_reduce, for sums over several tensors. The hosts sum integer tensors.
  void all_reduce(std::span<const TensorView> values) const;
  // Like Communicator::all_to_all. Always staged by the hosts; meant for rare calls.
  void all_to_all(const ConstTensorView& send, std::span<const std::int64_t> send_rows,
                  const TensorView& recv, std::span<const std::int64_t> recv_rows) const;

 private:
  bool is_on_host() const { return device_.memory() == Memory::host; }
  bool is_alone_on_gpu() const { return !is_on_host() && comm_.size() == 1; }
  bool uses_peers(Dtype dtype) const;
  // Returns the number of elements that the hosts exchange at a time for each of `num_parts`.
  std::int64_t staged_elements(std::int64_t most, std::int64_t num_parts, Dtype dtype) const;

  Communicator& comm_;
  const Device& device_;
  std::int64_t staging_bytes_;
  std::shared_ptr<const PeerStaging> peers_;  // null if the communicator moves everything
};

}  // namespace switchyard
