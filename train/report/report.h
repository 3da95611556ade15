// A run as one HTML file that needs nothing else.
#pragma once

#include <filesystem>
#include <string>

#include "training/history.h"

namespace switchyard::train {

std::string report_html(const RunSummary& run);

// Replaces a file at once, wherever links lead to it; a device or a pipe is written to as it is.
// StorageError names what could not be written.
void write_report(const std::filesystem::path& path, const RunSummary& run);

}  // namespace switchyard::train
