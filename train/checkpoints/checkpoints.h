// A folder of a run's checkpoints: saving, choosing one to go on from, and going on.
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

// The checkpoints of a folder, the newest first: "step-00000100.safetensors". None where there is
// no such folder.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& folder);

// The names of an optimizer's tensors begin so, and go on as those of the parameters.
constexpr std::string_view kOptimizerPrefix = "optimizer.";

// A checkpoint's own config, progress and marks, before a trainer is made from it.
struct CheckpointHeader {
  std::filesystem::path path;
  TrainConfig config;
  Progress progress;
  std::string corpus;  // what it was called
  std::uint64_t corpus_hash = 0;
  std::uint64_t parameters_sum = 0;  // over all bytes of the parameters
  std::uint64_t training_sum = 0;    // and over those that only training needs
  // As it was opened: it stays readable when its name is removed. None: it was not read.
  std::optional<Checkpoint> file = std::nullopt;
};
// Names a checkpoint that is not what was saved, and the one before it.
class DamagedCheckpoint : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};
// `path` is a checkpoint, or a folder: then the newest that a run which saves there does not remove
// meanwhile. Not collective. InvalidArgument names a path that leads to none of ours, and one whose
// options ask for more than it holds.
CheckpointHeader read_header(const std::filesystem::path& path);
// The same, collective: every rank reads it, and errors are the same on all. One that is another on
// some rank is an InvalidArgument.
CheckpointHeader read_header(Communicator& world, const std::filesystem::path& path);

// While rank 0 has one, no other run begins to save into that folder; a process that ends gives it
// back.
using FolderLock = std::shared_ptr<const void>;

// Collective, before a run begins that will save into `folder`, so that what would stop it later
// stops it now: makes the folder, and removes what killed runs left there under hidden names; where
// the file system knows no locks, only what is an hour old. `resumed` is the checkpoint that the
// run goes on from, or empty. A folder that holds checkpoints, but not that one, is another run's,
// as is one that is locked: an InvalidArgument. StorageError if the folder cannot be made or
// written to. The same on every rank.
FolderLock prepare_folder(Communicator& world, const std::filesystem::path& folder,
                          const std::filesystem::path& resumed);

// Collective. Writes folder/step-00000100.safetensors, say: parameters, moments, balancers,
// history, progress, and sums over all bytes. Then removes all but the newest `keep`. A
// StorageError says which checkpoint is still good.
void save(Trainer& trainer, const std::filesystem::path& folder, std::int64_t keep);

// Collective. Whatever mesh it was saved with. InvalidArgument, the same on every rank, names a
// checkpoint that is damaged, also where only a bit of a weight is, and the one before it.
void load(Trainer& trainer, const CheckpointHeader& header);
// The parameters alone, for sampling.
void load_values(Transformer& model, const CheckpointHeader& header);

}  // namespace switchyard::train
