// SPDX-License-Identifier: Apache-2.0
// Converts a run's history to tensors of a checkpoint and back, bit for bit.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "options/config.h"
#include "switchyard/tensor.h"
#include "training/history.h"

namespace switchyard::train {

// Returns i64 tensors by name, one row per record. Floating-point numbers are stored as their bits.
std::map<std::string, Tensor> to_tensors(const History& history, const ModelConfig& config);

// Throws an InvalidArgument that names a tensor that is missing or does not have the shape that
// this model needs.
History history_from(const std::map<std::string, Tensor>& tensors, const ModelConfig& config);

// Checks that steps are in order and at most `last_step`, and that no pick count is negative.
// Throws an InvalidArgument that names the offending tensor.
void require_sound(const History& history, std::int64_t last_step);

}  // namespace switchyard::train
