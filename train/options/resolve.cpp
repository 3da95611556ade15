// The config of a run, from all that says something about it.
#include "checkpoints/checkpoints.h"
#include "options/options.h"

namespace switchyard::train {

TrainConfig resolve(const Assignments& file, const Assignments& flags) {
  auto given = merge(std::nullopt, file, flags);
  if (given.resume.empty()) return given;
  return merge(read_header(given.resume).config, file, flags);
}

}  // namespace switchyard::train
