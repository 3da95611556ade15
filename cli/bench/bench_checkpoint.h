// switchyard bench checkpoint: saving experts and loading them again, beside plain reads of the
// same bytes.
#pragma once

#include <cstdint>
#include <filesystem>

#include "launch.h"

namespace switchyard::cli {

struct BenchCheckpointOptions {
  LaunchOptions launch;
  std::uint64_t size = std::uint64_t{1} << 30;  // bytes of all experts, about
  std::filesystem::path folder;                 // empty: the system's for temporary files
  int repeat = 5;
  bool json = false;
};

void bench_checkpoint(const BenchCheckpointOptions& options);

}  // namespace switchyard::cli
