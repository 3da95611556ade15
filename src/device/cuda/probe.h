// What is known of CUDA devices. Nothing runs on them yet.
#pragma once

#include <string>

#include "switchyard/build_info.h"

namespace switchyard::cuda {

std::string toolkit_version();
Feature device_feature();

}  // namespace switchyard::cuda
