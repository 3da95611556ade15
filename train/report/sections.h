// SPDX-License-Identifier: Apache-2.0
// The sections of a report, in order. Each is empty if the run has no data for it.
#pragma once

#include <string>

#include "training/history.h"

namespace switchyard::train {

std::string header_html(const RunSummary& run);
std::string loss_html(const RunSummary& run);
// Pictures of how evenly the experts of every layer were loaded over time.
std::string load_map_html(const RunSummary& run);
// The rows and the waits of every rank in the MoE layers.
std::string ranks_html(const RunSummary& run);
std::string stages_html(const RunSummary& run);
std::string bytes_html(const RunSummary& run);
// Charts of the learning rate, the gradient norm and tokens per second.
std::string progress_html(const RunSummary& run);
std::string sample_html(const RunSummary& run);
std::string configuration_html(const RunSummary& run);
// The date, the machine, the program, the text, the memory, and where the run was interrupted.
std::string origin_html(const RunSummary& run);

}  // namespace switchyard::train
