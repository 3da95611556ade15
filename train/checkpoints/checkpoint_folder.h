// SPDX-License-Identifier: Apache-2.0
// The files in a checkpoint folder: their names, which ones to remove, and which one to resume
// from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace switchyard::train {

std::filesystem::path folder_of(const std::filesystem::path& checkpoint);
// folder/step-00000100.safetensors
std::filesystem::path checkpoint_path(const std::filesystem::path& folder, std::int64_t step);

// Removes all but the newest `keep` checkpoints up to `step`, and never that of `step` itself.
// Checkpoints after `step` belong to an earlier run that resumed from the same point. They are
// renamed to step-00000100.safetensors.set-aside, so that the newest one is this run's. Errors are
// ignored: a file that cannot be removed or renamed stays.
void prune_checkpoints(const std::filesystem::path& folder, std::int64_t step, std::int64_t keep);

// Removes the hidden temporary files that killed runs left behind. If `others_may_save`, removes
// only files last written more than an hour ago.
void remove_leftovers(const std::filesystem::path& folder, bool others_may_save);

// Returns the message for a damaged checkpoint: what is wrong with it, and which other one to use.
std::string words_for_damage(const std::filesystem::path& path, std::string_view what);

// Returns the end of the message for a failed save at `step`: which checkpoint is the last good
// one.
std::string words_for_last_good(const std::filesystem::path& folder, std::int64_t step);

}  // namespace switchyard::train
