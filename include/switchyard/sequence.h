// SPDX-License-Identifier: Apache-2.0
// Sequences split over ranks into shards of uneven length, without padding tokens.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/dispatcher.h"
#include "switchyard/export.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// One rank's shard of `batch` sequences of `length` tokens. Each sequence is split into sp_size
// pieces of padded_length() tokens; the last pieces may be shorter or empty. A rank's tokens are
// its pieces of all sequences, sequence by sequence: local token (b, i) is global token b · length
// + offset() + i.
class SWITCHYARD_API SequenceShard {
 public:
  // Describes the shard of sp_rank. Throws InvalidArgument if a size is negative, sp_size is 0,
  // sp_rank is out of range, or batch · length does not fit 64 bits.
  SequenceShard(std::int64_t batch, std::int64_t length, int sp_size, int sp_rank);

  std::int64_t batch() const { return batch_; }
  std::int64_t length() const { return length_; }
  int sp_size() const { return sp_size_; }
  int sp_rank() const { return sp_rank_; }

  // The length of a full piece, ceil(length / sp_size), the same on every rank.
  std::int64_t padded_length() const {
    return length_ / sp_size_ + (length_ % sp_size_ == 0 ? 0 : 1);
  }
  // The position of the piece's first token in its sequence; at most length.
  std::int64_t offset() const { return offset_of(sp_rank_); }
  // The number of tokens in the piece; may be 0.
  std::int64_t count() const { return count_of(sp_rank_); }
  // The number of tokens of this rank, batch · count.
  std::int64_t num_tokens() const { return batch_ * count(); }

  // The first token of a rank's piece, and the number of its tokens.
  std::int64_t offset_of(int sp_rank) const;
  std::int64_t count_of(int sp_rank) const;

 private:
  std::int64_t batch_;
  std::int64_t length_;
  int sp_size_;
  int sp_rank_;
};

// All functions below except gather_sequence_backward_slice are collective over `sp`, whose ranks
// are those of the shard. Tensors are in the memory of `device`, and so are the results. A tensor
// that does not fit, or is in other memory, throws InvalidArgument; in a collective function the
// other ranks throw a CommunicationError that quotes it.
//
// GPUs that can access each other's memory move tokens themselves, through a buffer of 32 MiB per
// rank. The first call makes this buffer; the communicator keeps it and the device. A call then
// costs the hosts one small exchange; they copy no tokens and do not wait for the GPUs. If a rank
// fails later, a later call throws CommunicationError and the results are NaN. On CPUs, and between
// GPUs without such access, the hosts stage the tokens, and wait.

// Gathers the tokens of all ranks, local [batch · count, H] with any row stride, into whole
// sequences [batch, length, H].
SWITCHYARD_API Tensor gather_sequence(Communicator& sp, const SequenceShard& shard,
                                      const ConstTensorView& local, const Device& device = {});

// Computes the adjoint of gather_sequence if the computation after it is replicated over sp: every
// rank holds the same whole gradient d_full [batch, length, H] and takes its own slice of it,
// [batch · count, H]. Sends nothing.
SWITCHYARD_API Tensor gather_sequence_backward_slice(const SequenceShard& shard,
                                                     const ConstTensorView& d_full,
                                                     const Device& device = {});
// Computes the adjoint of gather_sequence if each rank used the sequence differently: the d_full
// [batch, length, H] of the ranks are partial gradients, which are added in rank order in f32.
// Returns this rank's slice, [batch · count, H].
SWITCHYARD_API Tensor gather_sequence_backward_sum(Communicator& sp, const SequenceShard& shard,
                                                   const ConstTensorView& d_full,
                                                   const Device& device = {});

// Combines the shard's tokens and then gathers them with gather_sequence. Returns whole sequences
// [batch, length, H] on the dispatcher's device. The adjoint is gather_sequence_backward_slice or
// _sum, whichever fits the computation that follows, and then combine_backward.
SWITCHYARD_API Tensor combine_sequence(Dispatcher& dispatcher, const Plan& plan,
                                       const CombineInput& in, Communicator& sp,
                                       const SequenceShard& shard);

}  // namespace switchyard
