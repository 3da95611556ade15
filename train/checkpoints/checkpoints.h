// SPDX-License-Identifier: Apache-2.0
// Saves a run's checkpoints to a folder, picks one to resume from, and loads it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/checkpoint.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "training/trainer.h"

namespace switchyard::train {

// Returns the checkpoints in a folder ("step-00000100.safetensors"), newest first. Empty if the
// folder does not exist.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& folder);

// Prefix of the optimizer's tensors. The parameter's name follows.
constexpr std::string_view kOptimizerPrefix = "optimizer.";

// A checkpoint's config, progress and checksums, read before a trainer is made from it.
struct CheckpointHeader {
  std::filesystem::path path;
  TrainConfig config;
  Progress progress;
  std::string corpus;  // its name
  std::uint64_t corpus_hash = 0;
  std::uint64_t parameters_sum = 0;  // over all bytes of the parameters
  std::uint64_t training_sum = 0;    // over all bytes that only training needs
  // The open file, which stays readable after its name is removed. Empty if it was not read from a
  // file.
  std::optional<Checkpoint> file = std::nullopt;
};
// Thrown when a checkpoint differs from what was saved. The message names it and the one before it.
class DamagedCheckpoint : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};
// Reads the header of the checkpoint `path`, or of the newest checkpoint in the folder `path`.
// Retries if a run that saves there removes the file in the meantime. Not collective. Throws an
// InvalidArgument if the path leads to no checkpoint of this trainer, or if the checkpoint's config
// needs more than the file holds.
CheckpointHeader read_header(const std::filesystem::path& path);
// Collective: every rank reads the header, and errors are the same on all ranks. Throws
// InvalidArgument if ranks read different checkpoints.
CheckpointHeader read_header(Communicator& world, const std::filesystem::path& path);

// While rank 0 holds this lock, no other run can start saving to the folder. It is released when
// the process ends.
using FolderLock = std::shared_ptr<const void>;

// Prepares `folder` before a run that saves to it, so that the run fails early rather than at its
// first save. Creates the folder and removes the hidden files that killed runs left there; if the
// file system does not support locks, only those older than an hour. `resumed` is the checkpoint
// that the run resumes from, or empty. Throws InvalidArgument if the folder is locked by another
// run, or holds checkpoints and the run does not resume from it. Throws StorageError if the folder
// cannot be created or written to. Collective; errors are the same on every rank.
FolderLock prepare_folder(Communicator& world, const std::filesystem::path& folder,
                          const std::filesystem::path& resumed);

// Writes a checkpoint such as folder/step-00000100.safetensors: parameters, moments, balancers,
// history, progress, and checksums over all bytes. Then removes all but the newest `keep`. Throws a
// StorageError that names the last good checkpoint. Collective.
void save(Trainer& trainer, const std::filesystem::path& folder, std::int64_t keep);

// Restores the trainer from a checkpoint saved with any mesh. If the checkpoint is damaged, even by
// a single bit, throws an InvalidArgument that names it and the one before it. Collective; errors
// are the same on every rank.
void load(Trainer& trainer, const CheckpointHeader& header);
// Loads only the parameters, for sampling.
void load_values(Transformer& model, const CheckpointHeader& header);

}  // namespace switchyard::train
