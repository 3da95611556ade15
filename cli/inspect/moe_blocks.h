// The MoE blocks among the tensors of a checkpoint, by the names that conversions look for.
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
  std::string layout = {};  // "Hugging Face, packed"
  std::int64_t num_experts = 0;
  std::int64_t num_held = 0;  // in the checkpoint: fewer where it is one rank's
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::string dtype = {};                 // of the experts
  std::vector<std::string> bias = {};     // of the router: "gate", "score"
  std::int64_t shared_intermediate = 0;   // 0: no shared expert
  bool is_readable = true;                // all of its tensors are
  std::vector<std::string> missing = {};  // names that conversions would not find

  std::vector<std::string> expert_tensors = {};               // their names
  std::map<std::int64_t, std::int64_t> bytes_of_expert = {};  // in tensors of their own
  std::int64_t packed_bytes = 0;                              // in tensors of all experts

  bool is_whole() const { return num_held == num_experts && missing.empty(); }
  // Whether an optimizer keeps it for a block: then it has the form of one.
  bool is_optimizers() const;
};

// In order of prefix.
std::vector<FoundBlock> find_moe_blocks(const TensorInfos& tensors);

// What ranks read if experts are placed contiguously, over all blocks that are whole. Files may
// have thousands of sizes, and there may be thousands of ranks: it holds no product of the two.
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
