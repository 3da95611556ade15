// SPDX-License-Identifier: Apache-2.0
// Renders a run as one self-contained HTML file.
#pragma once

#include <filesystem>
#include <string>

#include "training/history.h"

namespace switchyard::train {

std::string report_html(const RunSummary& run);

// Replaces a regular file atomically, following symlinks. Writes directly to a device or a pipe.
// Throws a StorageError that names the file if it cannot be written.
void write_report(const std::filesystem::path& path, const RunSummary& run);

}  // namespace switchyard::train
