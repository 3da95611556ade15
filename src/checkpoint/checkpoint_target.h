// What may be at the path of a checkpoint that is to be saved.
#pragma once

#include <filesystem>

#include "switchyard/checkpoint.h"

namespace switchyard {

// Safetensors files and their indices, which are removed when their folder is replaced.
bool is_of_checkpoints(const std::filesystem::directory_entry& entry);

// InvalidArgument or StorageError says what is there that a checkpoint of this form cannot replace,
// or that its name is too long. Other reasons show when the first file is made.
void require_replaceable(const std::filesystem::path& path, CheckpointForm form);

}  // namespace switchyard
