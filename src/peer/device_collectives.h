// Collectives on tensors in the memory of any device.
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

// Tensors of the host's memory go through the communicator. Those of a GPU go through peer memory
// where the ranks reach each other's: the GPUs write to and read from staging buffers, and no host
// waits for them. Otherwise hosts stage them, a bounded piece at a time, and wait. Results have the
// same bits either way, NaNs excepted, which a GPU writes in a form of its own.
//
// Several tensors that are given together have one dtype and count as their elements, one after the
// other; rows may lie apart. Ranks give the same numbers of elements: other numbers are a
// CommunicationError.
class DeviceCollectives {
 public:
  // Tests choose between them.
  enum class Way { communicator, peer_memory };
  static constexpr std::int64_t kStagingBytes = std::int64_t{32} << 20;

  // Collective where the device is a GPU's. The first on a communicator and a device makes the
  // staging, which the communicator keeps for the next; later ones cost one small exchange of the
  // hosts. Both arguments must outlive this.
  DeviceCollectives(Communicator& comm, const Device& device);
  // Collective for peer memory; throws Unsupported on all ranks if they do not reach each other's.
  DeviceCollectives(Communicator& comm, const Device& device, Way way,
                    std::int64_t staging_bytes = kStagingBytes);
  ~DeviceCollectives();

  // all[r] becomes what rank r gives as its own.
  void all_gather(const ConstTensorView& own, std::span<const std::vector<TensorView>> all) const;
  // parts[r] is this rank's part of what rank r receives. Parts are added in rank order, in f32 for
  // bf16 and rounded once, as Communicator::reduce_scatter does.
  void reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                      const TensorView& sum) const;
  // As Communicator::all_reduce, for sums over several tensors. Hosts add whole numbers.
  void all_reduce(std::span<const TensorView> values) const;
  // As Communicator::all_to_all; always staged by the hosts, for calls that are rare.
  void all_to_all(const ConstTensorView& send, std::span<const std::int64_t> send_rows,
                  const TensorView& recv, std::span<const std::int64_t> recv_rows) const;

 private:
  bool is_on_host() const { return device_.memory() == Memory::host; }
  bool is_alone_on_gpu() const { return !is_on_host() && comm_.size() == 1; }
  bool uses_peers(Dtype dtype) const;
  // Elements that hosts exchange at a time for each of `num_parts`.
  std::int64_t staged_elements(std::int64_t most, std::int64_t num_parts, Dtype dtype) const;

  Communicator& comm_;
  const Device& device_;
  std::int64_t staging_bytes_;
  std::shared_ptr<const PeerStaging> peers_;  // null: the communicator moves everything
};

}  // namespace switchyard
