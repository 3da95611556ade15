// A run as one HTML file that needs nothing else.
#pragma once

#include <filesystem>
#include <string>

#include "training/history.h"

namespace switchyard::train {

std::string report_html(const RunSummary& run);

// Replaces the file at once. StorageError names what could not be written.
void write_report(const std::filesystem::path& path, const RunSummary& run);

}  // namespace switchyard::train
