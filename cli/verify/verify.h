// switchyard verify: computes recorded cases again and compares.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "device_choice.h"

namespace switchyard::cli {

struct VerifyOptions {
  std::vector<std::filesystem::path> paths;  // files, or folders of *.safetensors
  std::string comm = "threads";
  DeviceChoice device;                 // all ranks share one
  std::vector<int> ranks = {1, 2, 4};  // over threads, for cases that do not say
  bool json = false;
};

// Prints what was found; true if at least one case ran and none failed.
bool verify(const VerifyOptions& options);

}  // namespace switchyard::cli
