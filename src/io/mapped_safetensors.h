// Safetensors files that were mapped already.
#pragma once

#include "io/mapped_file.h"
#include "switchyard/safetensors.h"

namespace switchyard {

// As SafetensorsFile::open, which maps `path` first. The descriptor is needed for the header alone.
SafetensorsFile safetensors_in(const MappedFile& mapping, const std::filesystem::path& path);
// Without a descriptor.
const MappedFile& mapping_of(const SafetensorsFile& file);

}  // namespace switchyard
