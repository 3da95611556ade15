// SPDX-License-Identifier: Apache-2.0
// The tokens that a rank gets from a batch of sequences.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "switchyard/mesh.h"
#include "switchyard/sequence.h"

namespace switchyard::train {

// This rank's part of a batch: its sequences, and its piece of each along sp.
struct TokenBatch {
  SequenceShard shard;
  std::vector<std::uint8_t> tokens;   // [shard.num_tokens()]
  std::vector<std::uint8_t> targets;  // [shard.num_tokens()]: the byte after each token
  std::int64_t total_tokens = 0;      // tokens in the batch, over all ranks
};

// Returns this rank's part of `windows`, the whole batch: each of length + 1 bytes, the same on
// every rank. Sequences are divided over (dp, ep) in order and as evenly as possible; each is cut
// over sp.
TokenBatch cut_batch(Mesh& mesh, std::span<const std::string_view> windows, std::int64_t length);

}  // namespace switchyard::train
