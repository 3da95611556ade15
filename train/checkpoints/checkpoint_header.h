// SPDX-License-Identifier: Apache-2.0
// The header of a checkpoint, stored as metadata of its file.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "checkpoints/checkpoints.h"

namespace switchyard::train {

using Metadata = std::map<std::string, std::string>;

// Includes a checksum over the metadata, so that a flipped bit is detected.
Metadata to_metadata(const CheckpointHeader& header);

// Returns the expected value of train.metadata_sum.
std::string sum_of(const Metadata& metadata);

// Throws an InvalidArgument that names the file and the missing or invalid field, or both formats
// if the file's differs from this version's.
CheckpointHeader header_from(const Metadata& metadata, const std::filesystem::path& path);

}  // namespace switchyard::train
