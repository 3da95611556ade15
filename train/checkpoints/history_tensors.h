// A run's history as tensors of a checkpoint, to the last bit.
#pragma once

#include <map>
#include <string>

#include "options/config.h"
#include "switchyard/checkpoint.h"
#include "switchyard/tensor.h"
#include "training/history.h"

namespace switchyard::train {

// By name, all i64: a row a record. Numbers that are no integers lie there as their bits.
std::map<std::string, Tensor> to_tensors(const History& history, const ModelConfig& config);

// InvalidArgument names a tensor that is missing or has not the form of this model's.
History history_from(const Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace switchyard::train
