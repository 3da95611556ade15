// SPDX-License-Identifier: Apache-2.0
// Finds the MoE blocks of a checkpoint by the tensor names that conversions look for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "switchyard/checkpoint.h"

namespace switchyard::cli {

using TensorInfos = std::map<std::string, TensorInfo, std::less<>>;

struct FoundBlock {
  std::string prefix;
  std::string layout = {};  // such as "Hugging Face, packed"
  std::int64_t num_experts = 0;
  std::int64_t num_held = 0;  // experts in the checkpoint; fewer if it is one rank's part
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::string dtype = {};                 // dtype of the experts
  std::vector<std::string> bias = {};     // biases of the router: "gate", "score"
  std::int64_t shared_intermediate = 0;   // 0: no shared expert
  bool is_readable = true;                // true if all of its tensors are readable
  std::vector<std::string> missing = {};  // names that conversions need and would not find

  std::vector<std::string> expert_tensors = {};               // names
  std::map<std::int64_t, std::int64_t> bytes_of_expert = {};  // in tensors of a single expert
  std::int64_t packed_bytes = 0;                              // in tensors that hold all experts

  bool is_whole() const { return num_held == num_experts && missing.empty(); }
  // True if this is the state that an optimizer keeps for a block, which has the same form.
  bool is_optimizers() const;
};

// Returns the blocks in the order of their router tensors' names.
std::vector<FoundBlock> find_moe_blocks(const TensorInfos& tensors);

// The bytes that ranks read if experts are placed contiguously, over all blocks that are whole.
// There may be thousands of sizes and thousands of ranks, so this does not store their product.
struct RankReads {
  struct Experts {
    std::int64_t num_experts = 0;
    std::int64_t first = 0;
    std::int64_t last = 0;  // exclusive
  };
  Experts experts_of(std::int64_t num_experts, std::int64_t rank) const;

  std::vector<std::int64_t> sizes = {};         // the numbers of experts that blocks have
  std::vector<std::int64_t> expert_bytes = {};  // [ranks]
};
RankReads reads_of_ranks(const std::vector<FoundBlock>& blocks, int num_ranks);

}  // namespace switchyard::cli
