// What this build can do, and what of it can be used on this machine now.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

struct Feature {
  std::string name;
  bool available = false;
  std::string detail;  // a version or a description, or why it cannot be used
};

// A GPU that is there.
struct Gpu {
  int ordinal = 0;
  std::string name;
  std::vector<int> reaches = {};  // GPUs whose memory it reaches, besides its own
  bool is_under_mps = false;      // processes share it by way of MPS
};

SWITCHYARD_API std::string_view version();
// Products of CPUs have the same bits where this text is equal: "oneDNN 2.6.0 for avx512_core".
SWITCHYARD_API std::string cpu_numerics();
// Libraries that the build may be made with.
SWITCHYARD_API std::vector<Feature> build_features();
SWITCHYARD_API std::vector<Feature> devices();
SWITCHYARD_API std::vector<Gpu> gpus();
SWITCHYARD_API std::vector<Feature> communicator_backends();

}  // namespace switchyard
