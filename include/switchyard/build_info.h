// SPDX-License-Identifier: Apache-2.0
// Reports what this build supports and what is usable on this machine now.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "switchyard/export.h"

namespace switchyard {

// An optional part of a build or of a machine.
struct Feature {
  std::string name;
  bool available = false;
  std::string detail;  // a version or a description, or the reason it is unavailable
};

// A GPU that is present on this machine.
struct Gpu {
  int ordinal = 0;
  std::string name;
  std::vector<int> reaches = {};  // ordinals of the other GPUs whose memory it can access
  bool is_under_mps = false;      // true if processes share the GPU through MPS
};

SWITCHYARD_API std::string_view version();
// Identifies the CPU matmul library and its instruction set, such as "oneDNN 2.6.0 for
// avx512_core". Matrix products on CPUs have the same bits wherever this text is equal.
SWITCHYARD_API std::string cpu_numerics();
// Returns the compiler and the optional libraries, and whether this build includes them.
SWITCHYARD_API std::vector<Feature> build_features();
SWITCHYARD_API std::vector<Feature> devices();
SWITCHYARD_API std::vector<Gpu> gpus();
SWITCHYARD_API std::vector<Feature> communicator_backends();

}  // namespace switchyard
