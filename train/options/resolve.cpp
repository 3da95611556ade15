// The config of a run, from all that says something about it.
#include "checkpoints/checkpoint_folder.h"
#include "checkpoints/checkpoints.h"
#include "options/options.h"

namespace switchyard::train {

TrainConfig resolve(const Assignments& file, const Assignments& flags) {
  auto given = merge(std::nullopt, file, flags);
  if (given.resume.empty()) return given;
  auto checkpoint = read_header(given.resume);
  auto& save = checkpoint.config.save;
  if (!save.empty()) save = folder_of(checkpoint.path).string();  // it may have been moved
  return merge(checkpoint.config, file, flags);
}

}  // namespace switchyard::train
