// Sets of parameters as parts of checkpoints.
#pragma once

#include <map>
#include <string>

#include "model/parameters.h"
#include "switchyard/checkpoint.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// A set, and what its names in a checkpoint begin with.
struct NamedSet {
  std::string prefix;
  ParameterSet& set;
};

// What belongs to no MoE layer, by its name in a checkpoint.
std::map<std::string, TensorView> dense_tensors(const NamedSet& named);
// Of an MoE layer's names in a checkpoint.
std::string prefix_of(const NamedSet& named, const MoeBlock& block);

void add_set(CheckpointContents& contents, const NamedSet& named);
// This rank's part. Errors are those of load_tensor and load_block.
void load_set(const Checkpoint& checkpoint, const NamedSet& named);

}  // namespace switchyard::train
