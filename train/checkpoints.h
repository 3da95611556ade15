// A folder of a run's checkpoints: saving, choosing one to go on from, and going on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "switchyard/communicator.h"
#include "trainer.h"

namespace switchyard::train {

// The checkpoints of a folder, the newest first: "step-00000100.safetensors".
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& folder);

// A checkpoint's own config, progress and marks, before a trainer is made from it.
struct CheckpointHeader {
  std::filesystem::path path;
  TrainConfig config;
  Progress progress;
  std::uint64_t corpus_hash = 0;
};
// `path` is a checkpoint, or a folder: then its newest. Not collective. InvalidArgument names one
// that is damaged, and the one before it to resume from.
CheckpointHeader read_header(const std::filesystem::path& path);

// Collective. Writes folder/step-N.safetensors: parameters, moments, balancers, history, progress,
// and a sum over all bytes. Then removes all but the newest `keep`. A StorageError says which
// checkpoint is still good.
void save(Trainer& trainer, const std::filesystem::path& folder, std::int64_t keep);

// Collective. Whatever mesh it was saved with. InvalidArgument, the same on every rank, names a
// checkpoint that is damaged, also where only a bit of a weight is, and the one before it.
void load(Trainer& trainer, const CheckpointHeader& header);
// The parameters alone, for sampling.
void load_values(Transformer& model, const std::filesystem::path& path);

}  // namespace switchyard::train
