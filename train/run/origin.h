// SPDX-License-Identifier: Apache-2.0
// Gathers where a run takes place, and how its ranks are loaded.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/corpus.h"
#include "model/transformer.h"
#include "run/run.h"
#include "switchyard/communicator.h"
#include "training/run_origin.h"

namespace switchyard::train {

// Returns the current time in seconds since 1970, the same on every rank. Collective.
std::int64_t common_time(Communicator& world);

// Returns the name of the CPU as Linux gives it, or an empty string. `root` is the root of the file
// system to read.
std::string cpu_name(const std::filesystem::path& root = "/");

// "node1" for one host, otherwise "node1 (4 ranks), node2 (1 rank)", in order of their first ranks.
std::string describe_hosts(const std::vector<std::string>& host_of_rank);

// `began` is the time at which this program started the run. Collective.
RunOrigin gather_origin(Communicator& world, const Corpus& text, const Program& program,
                        std::int64_t began);

// Returns the use of every rank, or nothing if the model has no MoE layers. Collective.
std::vector<RankUse> gather_use(Transformer& model);

}  // namespace switchyard::train
