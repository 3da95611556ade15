// SPDX-License-Identifier: Apache-2.0
// Saves and loads parameter sets as parts of checkpoints.
#pragma once

#include <map>
#include <string>

#include "model/parameters.h"
#include "switchyard/checkpoint.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

// A parameter set and the prefix of its names in a checkpoint.
struct NamedSet {
  std::string prefix;
  ParameterSet& set;
};

// Returns the tensors outside the MoE layers, by their names in a checkpoint.
std::map<std::string, TensorView> dense_tensors(const NamedSet& named);
// Returns the prefix of an MoE layer's names in a checkpoint.
std::string prefix_of(const NamedSet& named, const MoeBlock& block);

void add_set(CheckpointContents& contents, const NamedSet& named);
// Loads this rank's part. Throws as load_tensor and load_block do.
void load_set(const Checkpoint& checkpoint, const NamedSet& named);

}  // namespace switchyard::train
