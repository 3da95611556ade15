// The parts of a report, in its order. Each is empty where the run has nothing for it.
#pragma once

#include <string>

#include "training/history.h"

namespace switchyard::train {

std::string header_html(const RunSummary& run);
std::string loss_html(const RunSummary& run);
// How evenly the experts of every layer were loaded, over time, as pictures.
std::string load_map_html(const RunSummary& run);
std::string stages_html(const RunSummary& run);
std::string bytes_html(const RunSummary& run);
// Learning rate, norm of the gradient and tokens a second.
std::string progress_html(const RunSummary& run);
std::string sample_html(const RunSummary& run);
std::string configuration_html(const RunSummary& run);

}  // namespace switchyard::train
