// SPDX-License-Identifier: Apache-2.0
// Checks what is already at the path where a checkpoint is to be saved.
#pragma once

#include <filesystem>

#include "switchyard/checkpoint.h"

namespace switchyard {

// True for safetensors files and their indexes, which are removed when their folder is replaced.
bool is_of_checkpoints(const std::filesystem::directory_entry& entry);

// Throws InvalidArgument or StorageError if a checkpoint of this form cannot replace what is at
// `path`, or if the name is too long. Other obstacles show up when the first file is created.
void require_replaceable(const std::filesystem::path& path, CheckpointForm form);

}  // namespace switchyard
