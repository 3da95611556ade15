// Finds a communicator backend by name.
#include <array>

#include "comm/backends.h"
#include "core/require.h"
#include "switchyard/build_info.h"

namespace switchyard {
namespace {

std::array<BackendEntry, 2> backends() { return {threads::backend(), mpi::backend()}; }

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
    return entry.connect(options);
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
