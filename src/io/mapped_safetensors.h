// SPDX-License-Identifier: Apache-2.0
// Opens safetensors files that are already mapped.
#pragma once

#include "io/mapped_file.h"
#include "switchyard/safetensors.h"

namespace switchyard {

// Like SafetensorsFile::open(path), but uses an existing mapping. The mapping's descriptor is used
// to read the header and is not kept.
SafetensorsFile safetensors_in(const MappedFile& mapping, const std::filesystem::path& path);
// Returns the mapping of a file. Its descriptor is null.
const MappedFile& mapping_of(const SafetensorsFile& file);

}  // namespace switchyard
