// What a checkpoint says about itself, as metadata of its file.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "checkpoints/checkpoints.h"

namespace switchyard::train {

using Metadata = std::map<std::string, std::string>;

// With a sum of its own, so that a bit that is wrong shows.
Metadata to_metadata(const CheckpointHeader& header);

// What train.metadata_sum of these must be.
std::string sum_of(const Metadata& metadata);

// InvalidArgument names the file, and the field that is missing or makes no sense; or both formats,
// where it is another than this version's.
CheckpointHeader header_from(const Metadata& metadata, const std::filesystem::path& path);

}  // namespace switchyard::train
