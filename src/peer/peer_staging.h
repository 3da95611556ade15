// SPDX-License-Identifier: Apache-2.0
// Staging buffers in peer memory, through which devices gather and sum each other's tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/kept_objects.h"
#include "peer/elements.h"
#include "peer/peer_memory.h"

namespace switchyard {

// The staging of one communicator and device. Each rank lends a buffer, with room for a piece from
// every rank, for the duration of a call. Larger tensors go in pieces, with two device meetings
// each.
class PeerStaging final : public KeptObject {
 public:
  // Collective. Makes buffers of about `bytes` each. Throws Unsupported on every rank if the ranks
  // cannot reach each other's memory.
  PeerStaging(Communicator& comm, const Device& device, std::int64_t bytes);

  const Device& device() const { return meetings_.memory().device(); }
  // True if devices can sum this dtype.
  static bool adds(Dtype dtype) { return dtype == Dtype::f32 || dtype == Dtype::bf16; }

  // Like those of DeviceCollectives. Throws if an earlier call has failed. If a meeting of this
  // call fails, f32 and bf16 results become NaN.
  void all_gather(const ConstTensorView& own, std::span<const std::vector<TensorView>> all) const;
  void reduce_scatter(std::span<const std::vector<ConstTensorView>> parts,
                      const TensorView& sum) const;
  void all_reduce(std::span<const TensorView> values) const;

 private:
  const DeviceBackend& backend() const { return backend_of(device()); }
  void make_tables();
  TensorView take_buffer(Dtype dtype) const;
  TensorView take_rows(std::int64_t rows, Dtype dtype) const;
  // Copies `rows` to rows first_row, first_row + 1, ... of every rank's buffer.
  void spread(const TensorView& rows, std::int64_t first_row, const TensorView& lent) const;
  // Computes rows[i] = Σ over ranks of row first_row + i of their buffers.
  void add_up(const TensorView& rows, std::int64_t first_row, const TensorView& lent) const;
  RowTable table(std::int64_t count, std::int64_t first_row, const TensorView& lent) const;
  void spoil_if_failed(const TensorView& staged) const;

  PeerMeetings meetings_;
  int rank_;
  std::int64_t num_ranks_;
  std::int64_t rows_each_;  // rows of a buffer for each rank
  Tensor slots_;            // [num_ranks · rows_each, num_ranks] i32: row r holds r everywhere
  Tensor buffers_;          // [rows_each, num_ranks] i32: every row holds 0, 1, …
};

}  // namespace switchyard
