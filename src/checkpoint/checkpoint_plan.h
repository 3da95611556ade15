// Who writes what of a checkpoint: the same on every rank, from what all have told.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_record.h"

namespace switchyard {

struct PlannedTensor {
  TensorForm form;
  int rank = 0;  // that writes it; of packed experts, the first of them
};

struct CheckpointPlan {
  std::map<std::string, PlannedTensor> tensors;    // all that will be there
  std::map<std::string, std::vector<int>> owners;  // by prefix, [E]: the rank that writes it
};

// Throws InvalidArgument if the ranks do not agree, or lack something together.
CheckpointPlan plan_checkpoint(std::span<const CheckpointRecord> records);

// Where a tensor of an expert is saved: bytes first … of a tensor of this name and form.
struct ExpertPlace {
  std::string name;
  TensorForm whole;
  std::int64_t first = 0;
};
// `tensor` is one that the block's experts have.
ExpertPlace place_of(std::string_view prefix, const BlockRecord& block, std::int64_t id,
                     std::size_t tensor, CheckpointForm form);

}  // namespace switchyard
