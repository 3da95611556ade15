// A run's history as tensors of a checkpoint, to the last bit.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "options/config.h"
#include "switchyard/tensor.h"
#include "training/history.h"

namespace switchyard::train {

// By name, all i64: a row a record. Numbers that are no integers lie there as their bits.
std::map<std::string, Tensor> to_tensors(const History& history, const ModelConfig& config);

// InvalidArgument names a tensor that is missing or has not the form of this model's.
History history_from(const std::map<std::string, Tensor>& tensors, const ModelConfig& config);

// Steps come in order, up to `last_step`, and nobody was picked less than never: InvalidArgument
// names the tensor that says otherwise.
void require_sound(const History& history, std::int64_t last_step);

}  // namespace switchyard::train
