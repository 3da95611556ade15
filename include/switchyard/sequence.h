// Sequences cut over ranks into shards of uneven length, without a padded token ever being made.
#pragma once

#include <cstdint>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/dispatcher.h"
#include "switchyard/export.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

// `batch` sequences of `length` tokens, each cut into sp_size pieces of padded_length() tokens; the
// last pieces may be shorter, or empty. A rank's tokens are those of its piece of every sequence,
// sequence by sequence: local token (b, i) is global token b · length + offset() + i.
class SWITCHYARD_API SequenceShard {
 public:
  // All tokens together can be counted by 64 bits.
  SequenceShard(std::int64_t batch, std::int64_t length, int sp_size, int sp_rank);

  std::int64_t batch() const { return batch_; }
  std::int64_t length() const { return length_; }
  int sp_size() const { return sp_size_; }
  int sp_rank() const { return sp_rank_; }

  // ceil(length / sp_size): the same on every rank.
  std::int64_t padded_length() const {
    return length_ / sp_size_ + (length_ % sp_size_ == 0 ? 0 : 1);
  }
  // The first token of the piece, at most length.
  std::int64_t offset() const { return offset_of(sp_rank_); }
  // Tokens of the piece; may be 0.
  std::int64_t count() const { return count_of(sp_rank_); }
  // Tokens of this rank: batch · count.
  std::int64_t num_tokens() const { return batch_ * count(); }

  std::int64_t offset_of(int sp_rank) const;
  std::int64_t count_of(int sp_rank) const;

 private:
  std::int64_t batch_;
  std::int64_t length_;
  int sp_size_;
  int sp_rank_;
};

// All but the slice are collective over `sp`, whose ranks are the shard's. Tensors are in the
// memory of `device`, and so is what is returned; tensors in another are an InvalidArgument, of
// which the other ranks learn.
//
// Where GPUs reach each other's memory, they move tokens themselves, through a buffer of 32 MiB a
// rank that the communicator keeps, and the device with it: a call costs one small exchange of the
// hosts, which copy nothing and do not wait for the GPUs. The first call makes the buffer. A rank
// that fails later is a CommunicationError of a later call, and what was returned is NaN. Elsewhere
// the hosts wait, and stage what crosses.

// local [batch · count, H] on every rank, rows apart or not → [batch, length, H].
SWITCHYARD_API Tensor gather_sequence(Communicator& sp, const SequenceShard& shard,
                                      const ConstTensorView& local, const Device& device = {});

// The adjoint of gather_sequence where what follows it is replicated over sp: every rank holds the
// whole gradient d_full [batch, length, H], equal on all, and takes its slice. Nothing is sent.
SWITCHYARD_API Tensor gather_sequence_backward_slice(const SequenceShard& shard,
                                                     const ConstTensorView& d_full,
                                                     const Device& device = {});
// The adjoint where each rank did something else with the sequence: the d_full [batch, length, H]
// of the ranks are parts of the gradient, added in rank order in f32.
SWITCHYARD_API Tensor gather_sequence_backward_sum(Communicator& sp, const SequenceShard& shard,
                                                   const ConstTensorView& d_full,
                                                   const Device& device = {});

// combine for the shard's tokens, then gather_sequence: [batch, length, H], on the dispatcher's
// device. Its adjoints are gather_sequence_backward_slice or _sum, whichever fits what follows, and
// then combine_backward.
SWITCHYARD_API Tensor combine_sequence(Dispatcher& dispatcher, const Plan& plan,
                                       const CombineInput& in, Communicator& sp,
                                       const SequenceShard& shard);

}  // namespace switchyard
