// SPDX-License-Identifier: Apache-2.0
// Causal attention of every head over the keys of whole sequences, and its gradients. The softmax
// covers a query's own and earlier positions.
#pragma once

#include <cstdint>

#include "model/compute.h"
#include "switchyard/sequence.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// T is the number of tokens in the shard; head h starts at column h · H / heads.
struct CausalForward {
  const SequenceShard& shard;
  std::int64_t heads = 1;
  ConstTensorView queries;  // [T, H]
  ConstTensorView keys;     // [batch · length, H]
  ConstTensorView values;   // [batch · length, H]
  TensorView mixed;         // out [T, H]
};
void causal_attention(Compute& compute, const CausalForward& args);

struct CausalBackward {
  const SequenceShard& shard;
  std::int64_t heads = 1;
  ConstTensorView queries;
  ConstTensorView keys;
  ConstTensorView values;
  ConstTensorView mixed;
  ConstTensorView d_mixed;  // [T, H]
  TensorView d_queries;     // out [T, H]
  TensorView d_keys;        // [batch · length, H], accumulated
  TensorView d_values;      // [batch · length, H], accumulated
};
void causal_attention_backward(Compute& compute, const CausalBackward& args);

}  // namespace switchyard::train
