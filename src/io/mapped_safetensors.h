// Safetensors files that were mapped already.
#pragma once

#include "io/mapped_file.h"
#include "switchyard/safetensors.h"

namespace switchyard {

// As SafetensorsFile::open, which maps `path` first.
SafetensorsFile safetensors_in(const MappedFile& mapping, const std::filesystem::path& path);

}  // namespace switchyard
