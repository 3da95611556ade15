// SPDX-License-Identifier: Apache-2.0
// Finds each rank's tokens in whole sequences. The collectives move exactly these tokens, without
// padding.
#include "switchyard/sequence.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "comm/agreement.h"
#include "core/check_memory.h"
#include "core/require.h"
#include "device/new_tensor.h"
#include "moe/plan/plan_data.h"
#include "peer/device_collectives.h"

namespace switchyard {
namespace {

void require_rank_of(const Communicator& sp, const SequenceShard& shard) {
  require(sp.size() == shard.sp_size() && sp.rank() == shard.sp_rank(),
          "the shard is rank {} of {}, but the communicator is rank {} of {}", shard.sp_rank(),
          shard.sp_size(), sp.rank(), sp.size());
}

void require_local(const SequenceShard& shard, const ConstTensorView& local, const Device& device) {
  require(local.shape().rank() == 2 && local.rows() == shard.num_tokens(),
          "local is {}, but the shard has {} x {} tokens", local.shape(), shard.batch(),
          shard.count());
  require_on_device(local, device.memory(), "local");
}

void require_full(const SequenceShard& shard, const ConstTensorView& full, const Device& device) {
  require(full.shape().rank() == 3 && full.shape()[0] == shard.batch() &&
              full.shape()[1] == shard.length() && full.is_contiguous(),
          "d_full is {} (contiguous: {}), but the sequence is [{},{},H]", full.shape(),
          full.is_contiguous(), shard.batch(), shard.length());
  require_on_device(full, device.memory(), "d_full");
}

// Returns the tokens of one rank in [batch, length, H] as a view with one row per sequence.
template <typename View>
View piece_of(const SequenceShard& shard, int sp_rank, const View& full) {
  const auto hidden = full.shape()[2];
  return {full.data() + shard.offset_of(sp_rank) * hidden * size_of(full.dtype()),
          full.dtype(),
          {shard.batch(), shard.count_of(sp_rank) * hidden},
          shard.length() * hidden,
          full.owner(),
          full.memory()};
}

// Returns the pieces of all ranks.
template <typename View>
std::vector<std::vector<View>> pieces_of(const SequenceShard& shard, const View& full) {
  std::vector<std::vector<View>> pieces;
  for (int r = 0; r < shard.sp_size(); ++r) pieces.push_back({piece_of(shard, r, full)});
  return pieces;
}

}  // namespace

SequenceShard::SequenceShard(std::int64_t batch, std::int64_t length, int sp_size, int sp_rank)
    : batch_(batch), length_(length), sp_size_(sp_size), sp_rank_(sp_rank) {
  require(batch >= 0 && length >= 0, "batch ({}) and length ({}) must not be negative", batch,
          length);
  require(length == 0 || batch <= std::numeric_limits<std::int64_t>::max() / length,
          "{} sequences of {} tokens are too many tokens to count", batch, length);
  require(sp_size > 0, "sp_size ({}) must be positive", sp_size);
  require(0 <= sp_rank && sp_rank < sp_size, "sp_rank ({}) must be a rank of {}", sp_rank, sp_size);
}

std::int64_t SequenceShard::offset_of(int sp_rank) const {
  require(0 <= sp_rank && sp_rank < sp_size_, "sp_rank ({}) must be a rank of {}", sp_rank,
          sp_size_);
  // Pieces that would start past the end are empty. Returning here also keeps the product from
  // overflowing.
  if (sp_rank > 0 && padded_length() > length_ / sp_rank) return length_;
  return sp_rank * padded_length();
}

std::int64_t SequenceShard::count_of(int sp_rank) const {
  return std::min(padded_length(), length_ - offset_of(sp_rank));
}

Tensor gather_sequence(Communicator& sp, const SequenceShard& shard, const ConstTensorView& local,
                       const Device& device) {
  check_arguments({&sp}, "gather_sequence", [&] {
    require_rank_of(sp, shard);
    require_local(shard, local, device);
  });
  return or_abort_alone({&sp}, "gather_sequence", [&] {
    Tensor full =
        new_tensor(device, {shard.batch(), shard.length(), local.shape()[1]}, local.dtype());
    DeviceCollectives(sp, device).all_gather(local, pieces_of(shard, full.view()));
    return full;
  });
}

Tensor gather_sequence_backward_slice(const SequenceShard& shard, const ConstTensorView& d_full,
                                      const Device& device) {
  require_full(shard, d_full, device);
  Tensor d_local = new_tensor(device, {shard.num_tokens(), d_full.shape()[2]}, d_full.dtype());
  const auto piece = piece_of(shard, shard.sp_rank(), d_full);
  device.copy(piece, TensorView(d_local.data(), piece.dtype(), piece.shape(),
                                piece.shape().row_elements(), {}, d_local.memory()));
  return d_local;
}

Tensor gather_sequence_backward_sum(Communicator& sp, const SequenceShard& shard,
                                    const ConstTensorView& d_full, const Device& device) {
  check_arguments({&sp}, "gather_sequence_backward_sum", [&] {
    require_rank_of(sp, shard);
    require_full(shard, d_full, device);
  });
  return or_abort_alone({&sp}, "gather_sequence_backward_sum", [&] {
    Tensor d_local = new_tensor(device, {shard.num_tokens(), d_full.shape()[2]}, d_full.dtype());
    DeviceCollectives(sp, device).reduce_scatter(pieces_of(shard, d_full), d_local);
    return d_local;
  });
}

Tensor combine_sequence(Dispatcher& dispatcher, const Plan& plan, const CombineInput& in,
                        Communicator& sp, const SequenceShard& shard) {
  check_arguments({&sp, &dispatcher.communicator()}, "combine_sequence", [&] {
    require_rank_of(sp, shard);
    require(plan.num_tokens() == shard.num_tokens(),
            "the plan has {} tokens, but the shard has {} x {}", plan.num_tokens(), shard.batch(),
            shard.count());
  });
  const Device& device = data_of(plan).device;
  Tensor local = or_abort_alone({&sp, &dispatcher.communicator()}, "combine_sequence", [&] {
    return new_tensor(device, {plan.num_tokens(), plan.options().hidden}, plan.options().dtype);
  });
  dispatcher.combine(plan, in, local);
  return gather_sequence(sp, shard, local, device);
}

}  // namespace switchyard
