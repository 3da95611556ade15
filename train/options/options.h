// The names, values and meanings of a run's options: the same as flags, in files and in
// checkpoints.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "options/config.h"
#include "switchyard/mesh.h"

namespace switchyard::train {

struct Option {
  std::string name;     // "learning-rate": the flag is --learning-rate
  std::string section;  // "Model", "Optimizer", …: for help and reports
  std::string type;     // "N", "PATH", "bias|loss|none"
  std::string help;     // without the default
  // Both about the config that options_of was given. set throws InvalidArgument that names the
  // option, the value and what is allowed.
  std::function<void(const std::string& value)> set;
  std::function<std::string()> get;
  bool is_fixed = false;  // a run that is resumed must not change it
};

// Of every value of `config`, which must outlive them.
std::vector<Option> options_of(TrainConfig& config);

using Assignments = std::vector<std::pair<std::string, std::string>>;  // option, value

// InvalidArgument names an option that there is not, and the one that was meant.
void assign(TrainConfig& config, const Assignments& values);

// An object whose keys are names of options; InvalidArgument names the source and the key that is
// wrong.
std::string to_json(const TrainConfig& config);
Assignments parse_config(std::string_view json, std::string_view source);

// Defaults; what a checkpoint says, if one is resumed; the file's; the flags'. InvalidArgument
// names an option that the checkpoint does not allow to change, and both values. What nobody gave
// yields to what somebody did: a warm-up is never longer than the run, nor a final rate higher
// than the highest. A run that saved goes on saving into the folder that it is resumed from.
TrainConfig resolve(const Assignments& file, const Assignments& flags);
// The same of a checkpoint that was read already.
TrainConfig merge(const std::optional<TrainConfig>& checkpoint, const Assignments& file,
                  const Assignments& flags);

// Of sizes that must fit each other; InvalidArgument names the options.
void check(const ModelConfig& config);
// Of values that must fit each other and the number of ranks; InvalidArgument names the options.
void check(const TrainConfig& config, int num_ranks);
// Gives up a mesh that a checkpoint had with another number of ranks, and checks the rest.
void fit_mesh(TrainConfig& config, int num_ranks);
// (dp, ep, sp), outermost first. InvalidArgument where they are not so many ranks.
std::vector<MeshAxis> mesh_axes(const MeshConfig& config, int num_ranks);

}  // namespace switchyard::train
