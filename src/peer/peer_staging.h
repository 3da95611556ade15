// Staging buffers in peer memory, through which devices gather and add up each other's tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/kept_objects.h"
#include "peer/elements.h"
#include "peer/peer_memory.h"

namespace switchyard {

// Of one communicator and device. A buffer of all ranks' pieces is lent for the time of a call;
// what is larger than it goes in pieces, each with two meetings of the devices.
class PeerStaging final : public KeptObject {
 public:
  // Collective: buffers of so many bytes, or a little more. Throws Unsupported on every rank if
  // ranks do not reach each other's memory.
  PeerStaging(Communicator& comm, const Device& device, std::int64_t bytes);

  const Device& device() const { return meetings_.memory().device(); }
  // Whether devices can add up these.
  static bool adds(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16; }

  // As those of DeviceCollectives. Throws what a call before this could not; where a meeting of
  // this one fails, results of f32 and bf16 become NaN.
  void all_gather(const ConstTensorView& own, std::span<const std::vector<TensorView>> all) const;
  void reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                      const TensorView& sum) const;
  void all_reduce(std::span<const TensorView> values) const;

 private:
  const DeviceBackend& backend() const { return backend_of(device()); }
  void make_tables();
  TensorView take_buffer(Dtype dtype) const;
  TensorView take_rows(std::int64_t rows, Dtype dtype) const;
  // Rows of this rank's buffer to the same places of every rank's.
  void spread(const TensorView& rows, std::int64_t first_row, const TensorView& lent) const;
  // rows[i] = Σ over ranks of row first_row + i of their buffers.
  void add_up(const TensorView& rows, std::int64_t first_row, const TensorView& lent) const;
  RowTable table(std::int64_t count, std::int64_t first_row, const TensorView& lent) const;
  void spoil_if_failed(const TensorView& staged) const;

  PeerMeetings meetings_;
  int rank_;
  std::int64_t num_ranks_;
  std::int64_t rows_each_;  // of a buffer, for each rank
  Tensor slots_;            // [num_ranks · rows_each, num_ranks] i32: its own row's number
  Tensor buffers_;          // [rows_each, num_ranks] i32: 0, 1, …
};

}  // namespace switchyard
