#include "comm/check_arguments.h"

#include <fmt/format.h>

#include "comm/gather_strings.h"

namespace switchyard {

std::string first_objection(Communicator& comm, std::string_view operation,
                            const std::string& objection) {
  const auto objections = gather_strings(comm, objection);
  for (std::size_t r = 0; r < objections.size(); ++r) {
    if (!objections[r].empty()) return fmt::format("{}: rank {}: {}", operation, r, objections[r]);
  }
  return {};
}

}  // namespace switchyard
