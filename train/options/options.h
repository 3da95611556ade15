// SPDX-License-Identifier: Apache-2.0
// The names, values and meanings of a run's options, shared by flags, files and checkpoints.
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
  // Both access the config passed to options_of(). `set` throws InvalidArgument that names the
  // option, the value and what is allowed.
  std::function<void(const std::string& value)> set;
  std::function<std::string()> get;
  bool is_fixed = false;  // a resumed run must not change it
};

// Returns an option for every value of `config`, which must outlive them.
std::vector<Option> options_of(TrainConfig& config);

using Assignments = std::vector<std::pair<std::string, std::string>>;  // option, value

// Throws InvalidArgument for an unknown option, and names the closest known one.
void assign(TrainConfig& config, const Assignments& values);

// Converts options to and from a JSON object whose keys are their names. Parsing throws
// InvalidArgument that names `source` and the offending key.
std::string to_json(const TrainConfig& config);
Assignments parse_config(std::string_view json, std::string_view source);

// Combines defaults, the resumed checkpoint if any, the file and the flags; later ones win. Throws
// InvalidArgument if an option changes that the checkpoint fixes, naming both values, or if a given
// warm-up is longer than the run. A final rate that was not given is lowered to the peak rate if
// necessary. A run that saved continues to save into the folder that it is resumed from.
TrainConfig resolve(const Assignments& file, const Assignments& flags);
// Like resolve(), with a checkpoint that has already been read.
TrainConfig merge(const std::optional<TrainConfig>& checkpoint, const Assignments& file,
                  const Assignments& flags);

// Checks that sizes fit each other. Throws InvalidArgument that names the options.
void check(const ModelConfig& config);
// Checks that values fit each other and the number of ranks. Throws InvalidArgument that names the
// options.
void check(const TrainConfig& config, int num_ranks);
// Discards the mesh of a checkpoint if it was made with another number of ranks, and checks the
// rest.
void fit_mesh(TrainConfig& config, int num_ranks);
// Returns (dp, ep, sp), outermost first. Throws InvalidArgument if their product is not
// `num_ranks`.
std::vector<MeshAxis> mesh_axes(const MeshConfig& config, int num_ranks);

}  // namespace switchyard::train
