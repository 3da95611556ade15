// The files of a folder of checkpoints: their names, which may go, and which is left to go on from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace switchyard::train {

std::filesystem::path folder_of(const std::filesystem::path& checkpoint);
// folder/step-00000100.safetensors
std::filesystem::path checkpoint_path(const std::filesystem::path& folder, std::int64_t step);

// Removes all but the newest `keep` of those up to `step`, which itself stays; what cannot be
// removed stays too. Later ones are those of a run that went on from where this one did: they are
// renamed to step-00000100.safetensors.set-aside, so that the newest is this run's.
void prune_checkpoints(const std::filesystem::path& folder, std::int64_t step, std::int64_t keep);

// Removes what saving left under hidden names when a run was killed. Where nothing tells whether
// others are saving now, only what nobody has written to for an hour.
void remove_leftovers(const std::filesystem::path& folder, bool others_may_save);

// What to say of a checkpoint that is damaged: that, and which other to go on from.
std::string words_for_damage(const std::filesystem::path& path, std::string_view what);

// What to say after that of `step` could not be saved: which is the last good one.
std::string words_for_last_good(const std::filesystem::path& folder, std::int64_t step);

}  // namespace switchyard::train
