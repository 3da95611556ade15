// SPDX-License-Identifier: Apache-2.0
// Causal attention with rotary positions, over sequences that are cut over the ranks of sp.
#pragma once

#include <cstdint>

#include "model/compute.h"
#include "switchyard/communicator.h"
#include "switchyard/sequence.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

template <typename View>
struct BasicAttentionTensors {
  View qkv;  // [3·H, H]: queries, keys, values, each by head
  View out;  // [H, H]
};
using AttentionWeights = BasicAttentionTensors<ConstTensorView>;
using AttentionViews = BasicAttentionTensors<TensorView>;  // for reading and writing
using AttentionGradients = AttentionViews;                 // outputs of backward

struct AttentionShape {
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  float rotary_base = 10000.0F;
};

// Saved by forward for backward; T is the number of tokens in the shard. x is not copied.
struct AttentionSaved {
  Tensor queries;  // [T, H] rotated
  Tensor keys;     // [batch, length, H] rotated; whole sequences
  Tensor values;   // [batch, length, H]
  Tensor mixed;    // [T, H] input of the output projection
};

// Collective over `sp`, which cuts sequences as `shard` says: keys and values are gathered, and
// their gradients summed back. A rank with an empty piece or batch takes part like any other.
class Attention {
 public:
  Attention(const AttentionShape& shape, Communicator& sp) : shape_(shape), sp_(sp) {}

  // Adds its result to y [T, H], which holds the residual.
  void forward(Compute& compute, const AttentionWeights& weights, const SequenceShard& shard,
               const ConstTensorView& x, const TensorView& y, AttentionSaved& saved) const;

  struct Backward {
    ConstTensorView x;                    // [T, H] as in forward
    ConstTensorView d_y;                  // [T, H]
    TensorView d_x;                       // out [T, H]
    const AttentionGradients& gradients;  // out: over this rank's tokens
  };
  void backward(Compute& compute, const AttentionWeights& weights, const SequenceShard& shard,
                const AttentionSaved& saved, const Backward& args) const;

 private:
  AttentionShape shape_;
  Communicator& sp_;
};

}  // namespace switchyard::train
