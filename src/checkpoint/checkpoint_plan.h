// SPDX-License-Identifier: Apache-2.0
// Plans which rank writes which part of a checkpoint. Every rank derives the same plan from the
// gathered records.
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
  int rank = 0;  // the rank that writes it; for packed experts, the first of several
};

struct CheckpointPlan {
  std::map<std::string, PlannedTensor> tensors;    // all tensors of the checkpoint
  std::map<std::string, std::vector<int>> owners;  // by prefix, [E]: the rank that writes each
};

// Throws InvalidArgument if the ranks disagree, or if an expert is missing on all of them.
CheckpointPlan plan_checkpoint(std::span<const CheckpointRecord> records);

// Where an expert's tensor is saved: at byte `first` of the tensor with this name and form.
struct ExpertPlace {
  std::string name;
  TensorForm whole;
  std::int64_t first = 0;
};
// `tensor` must be one that the block's experts have.
ExpertPlace place_of(std::string_view prefix, const BlockRecord& block, std::int64_t id,
                     std::size_t tensor, CheckpointForm form);

}  // namespace switchyard
