// Offsets and collectives at the padded length, tokens at their true number.
#include "switchyard/sequence.h"

#include <algorithm>
#include <cstring>

#include "comm/agreement.h"
#include "core/check_memory.h"
#include "core/require.h"

namespace switchyard {
namespace {

void copy_rows(std::byte* to, const std::byte* from, std::int64_t rows, std::int64_t row_bytes) {
  if (rows > 0) std::memcpy(to, from, static_cast<std::size_t>(rows * row_bytes));
}

void require_rank_of(const Communicator& sp, const SequenceShard& shard) {
  require(sp.size() == shard.sp_size() && sp.rank() == shard.sp_rank(),
          "the shard is rank {} of {}, but the communicator is rank {} of {}", shard.sp_rank(),
          shard.sp_size(), sp.rank(), sp.size());
}

void require_local(const SequenceShard& shard, const ConstTensorView& local) {
  require(local.shape().rank() == 2 && local.rows() == shard.num_tokens(),
          "local is {}, but the shard has {} x {} tokens", local.shape(), shard.batch(),
          shard.count());
  require_host(local, "local");
}

void require_full(const SequenceShard& shard, const ConstTensorView& full) {
  require(full.shape().rank() == 3 && full.shape()[0] == shard.batch() &&
              full.shape()[1] == shard.length() && full.is_contiguous(),
          "d_full is {} (contiguous: {}), but the sequence is [{},{},H]", full.shape(),
          full.is_contiguous(), shard.batch(), shard.length());
  require_host(full, "d_full");
}

// Copies the piece of one sp rank out of [batch, length, H] into rows that are `stride` apart from
// sequence to sequence.
void copy_piece(const SequenceShard& shard, int sp_rank, const ConstTensorView& full, std::byte* to,
                std::int64_t stride) {
  const auto row_bytes = full.shape()[2] * size_of(full.dtype());
  for (std::int64_t b = 0; b < shard.batch(); ++b) {
    const auto first = b * shard.length() + shard.offset_of(sp_rank);
    copy_rows(to + b * stride * row_bytes, full.data() + first * row_bytes, shard.count_of(sp_rank),
              row_bytes);
  }
}

}  // namespace

SequenceShard::SequenceShard(std::int64_t batch, std::int64_t length, int sp_size, int sp_rank)
    : batch_(batch), length_(length), sp_size_(sp_size), sp_rank_(sp_rank) {
  require(batch >= 0 && length >= 0, "batch ({}) and length ({}) must not be negative", batch,
          length);
  require(sp_size > 0, "sp_size ({}) must be positive", sp_size);
  require(0 <= sp_rank && sp_rank < sp_size, "sp_rank ({}) must be a rank of {}", sp_rank, sp_size);
}

std::int64_t SequenceShard::offset_of(int sp_rank) const {
  return std::min(sp_rank * padded_length(), length_);
}

std::int64_t SequenceShard::count_of(int sp_rank) const {
  return std::min(padded_length(), length_ - offset_of(sp_rank));
}

Tensor gather_sequence(Communicator& sp, const SequenceShard& shard, const ConstTensorView& local) {
  check_arguments({&sp}, "gather_sequence", [&] {
    require_rank_of(sp, shard);
    require_local(shard, local);
  });
  const auto hidden = local.shape()[1];
  const auto row_bytes = local.row_bytes();
  const auto padded = shard.padded_length();
  // The pad rows of this exchange are zero and are cut off again below.
  Tensor own = Tensor::zeros({shard.batch(), padded, hidden}, local.dtype());
  for (std::int64_t t = 0; t < local.rows(); ++t) {
    const auto b = t / shard.count();
    const auto i = t % shard.count();
    copy_rows(own.data() + (b * padded + i) * row_bytes, local.row(t), 1, row_bytes);
  }
  Tensor all({sp.size() * shard.batch(), padded, hidden}, local.dtype());
  sp.all_gather(own, all);
  Tensor full({shard.batch(), shard.length(), hidden}, local.dtype());
  for (int r = 0; r < sp.size(); ++r) {
    for (std::int64_t b = 0; b < shard.batch(); ++b) {
      copy_rows(full.data() + (b * shard.length() + shard.offset_of(r)) * row_bytes,
                all.view().row(r * shard.batch() + b), shard.count_of(r), row_bytes);
    }
  }
  return full;
}

Tensor gather_sequence_backward_slice(const SequenceShard& shard, const ConstTensorView& d_full) {
  require_full(shard, d_full);
  Tensor d_local({shard.num_tokens(), d_full.shape()[2]}, d_full.dtype());
  copy_piece(shard, shard.sp_rank(), d_full, d_local.data(), shard.count());
  return d_local;
}

Tensor gather_sequence_backward_sum(Communicator& sp, const SequenceShard& shard,
                                    const ConstTensorView& d_full) {
  check_arguments({&sp}, "gather_sequence_backward_sum", [&] {
    require_rank_of(sp, shard);
    require_full(shard, d_full);
  });
  const auto hidden = d_full.shape()[2];
  const auto padded = shard.padded_length();
  const Shape piece{shard.batch(), padded, hidden};
  Tensor pieces = Tensor::zeros({sp.size() * shard.batch(), padded, hidden}, d_full.dtype());
  for (int r = 0; r < sp.size(); ++r) {
    copy_piece(shard, r, d_full, pieces.view().row(r * shard.batch()), padded);
  }
  Tensor summed(piece, d_full.dtype());
  sp.reduce_scatter(pieces, summed);
  Tensor d_local({shard.num_tokens(), hidden}, d_full.dtype());
  const auto row_bytes = d_local.view().row_bytes();
  for (std::int64_t b = 0; b < shard.batch(); ++b) {
    copy_rows(d_local.view().data() + b * shard.count() * row_bytes, summed.view().row(b),
              shard.count(), row_bytes);
  }
  return d_local;
}

Tensor combine_sequence(Dispatcher& dispatcher, const Plan& plan, const CombineInput& in,
                        Communicator& sp, const SequenceShard& shard) {
  check_arguments({&sp, &dispatcher.communicator()}, "combine_sequence", [&] {
    require_rank_of(sp, shard);
    require(plan.num_tokens() == shard.num_tokens(),
            "the plan has {} tokens, but the shard has {} x {}", plan.num_tokens(), shard.batch(),
            shard.count());
    require_host(plan.slots(), "the plan");
  });
  Tensor local({plan.num_tokens(), plan.options().hidden}, plan.options().dtype);
  dispatcher.combine(plan, in, local);
  return gather_sequence(sp, shard, local);
}

}  // namespace switchyard
