// SPDX-License-Identifier: Apache-2.0
// Finds a communicator backend by name.
#include <algorithm>
#include <array>

#include "comm/backends.h"
#include "comm/gather_strings.h"
#include "core/require.h"
#include "switchyard/build_info.h"

namespace switchyard {
namespace {

std::array<BackendEntry, 2> backends() { return {threads::backend(), mpi::backend()}; }

// Throws Unsupported unless all ranks have the same version and CPU numerics. Different versions
// may not understand each other, and with different instructions an expert's bits would depend on
// its owner.
void require_same_library(Communicator& comm) {
  if (comm.size() == 1) return;
  const auto all =
      gather_strings(comm, fmt::format("Switchyard {} with {}", version(), cpu_numerics()));
  const auto other = std::ranges::find_if(all, [&](const auto& text) { return text != all[0]; });
  require<Unsupported>(
      other == all.end(),
      "connect: rank 0 has {}, but rank {} has {}; install one version, and run on "
      "CPUs of one kind or set ONEDNN_MAX_CPU_ISA to an instruction set that all "
      "of them have",
      all[0], other - all.begin(), other == all.end() ? "" : *other);
}

}  // namespace

std::unique_ptr<Communicator> connect(const ConnectOptions& options) {
  require(options.timeout.count() > 0, "timeout ({} ms) must be positive", options.timeout.count());
  std::vector<std::string_view> names;
  for (const BackendEntry& entry : backends()) {
    names.push_back(entry.name);
    if (entry.name != options.backend) continue;
    const Availability now = entry.availability();
    require<Unsupported>(now.available, "communicator backend \"{}\" cannot be used: {}",
                         entry.name, now.detail);
    auto comm = entry.connect(options);
    require_same_library(*comm);
    return comm;
  }
  throw InvalidArgument(fmt::format("communicator backend \"{}\" is unknown; there are: {}",
                                    options.backend, fmt::join(names, ", ")));
}

std::vector<Feature> communicator_backends() {
  std::vector<Feature> result;
  for (const BackendEntry& entry : backends()) {
    const Availability now = entry.availability();
    result.push_back({std::string(entry.name), now.available, now.detail});
  }
  return result;
}

}  // namespace switchyard
