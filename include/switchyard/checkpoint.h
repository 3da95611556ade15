// SPDX-License-Identifier: Apache-2.0
// Checkpoints: named tensors in safetensors files, saved by some ranks and loaded by any number of
// others.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/convert.h"
#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"
#include "switchyard/safetensors.h"
#include "switchyard/tensor.h"

namespace switchyard {

// An open checkpoint whose files have been validated. Tensors are memory-mapped, so a rank reads
// only what it touches. The object is immutable, so threads may share it; copies share the mapping.
class SWITCHYARD_API Checkpoint {
 public:
  // Opens a safetensors file, an index in Hugging Face's form (*.safetensors.index.json), or a
  // folder. A folder holds either one index or, without an index, safetensors files that have no
  // tensor name in common; hidden files are ignored. If a folder is replaced meanwhile, opens the
  // old or the new version, never a mix of both. Tensors that an index does not list are left out.
  // The total_size of an index is not checked, because writers disagree about what it counts.
  // Throws InvalidArgument, saying what is wrong with a file or, for an index, which file or tensor
  // is missing.
  static Checkpoint open(const std::filesystem::path& path);
  // Copied even when moved, because a move would leave an object without contents behind.
  Checkpoint(const Checkpoint&) = default;
  Checkpoint& operator=(const Checkpoint&) = default;

  const std::filesystem::path& path() const;
  // The metadata of the checkpoint. For an index, this is its "metadata" object, with numbers as
  // their JSON text; for a folder without an index, the entries that all files agree on.
  const std::map<std::string, std::string>& metadata() const;
  // The files, ordered by name. Each is mapped once.
  const std::vector<SafetensorsFile>& files() const;
  // Returns the tensor names that begin with `prefix`, in ascending order, including those that
  // cannot be read.
  std::vector<std::string> names(std::string_view prefix = {}) const;
  // Returns the file that holds the tensor. Throws InvalidArgument if there is no such tensor.
  const SafetensorsFile& file_of(std::string_view name) const;

  // Returns the tensors of all files, as SafetensorsFile::tensors does. Views keep the mapping of
  // their file alive. The first call makes the views and copies those tensors that their file does
  // not align to their element size.
  const NamedTensors& tensors() const;
  // Returns the tensor, as SafetensorsFile::tensor does. Throws InvalidArgument if there is no such
  // tensor, Unsupported if it cannot be read.
  ConstTensorView tensor(std::string_view name) const;

 private:
  struct Contents;
  explicit Checkpoint(std::shared_ptr<Contents> contents);

  std::shared_ptr<Contents> contents_;
};

// One rank's part of an MoE layer, or of the optimizer state of one. Tensors are saved under
// `prefix` plus the names that from_hugging_face reads. Every rank holds the router, and all
// experts have the same set of tensors.
struct CheckpointBlock {
  std::string prefix;  // "model.layers.3.mlp."
  MoeWeights tensors;
  ExpertPlacement placement;
  int rank = 0;  // this rank's number in the placement
};

// One rank's part of a checkpoint to be saved. Tensors may have any row stride, and are in host
// memory or in that of `device`, from which they are staged through the host 32 MiB at a time.
struct CheckpointContents {
  NamedTensors tensors = {};  // whole on every rank that lists them, with equal bytes
  std::vector<CheckpointBlock> blocks = {};
  // Metadata of the checkpoint; only rank 0's is saved. Every file also gets "format": "pt", which
  // Transformers requires.
  std::map<std::string, std::string> metadata = {};
  Device device = {};
};

// How a checkpoint is laid out in files.
enum class CheckpointForm {
  one_file,       // `path` is a safetensors file; experts are packed as [E, …]
  file_per_rank,  // `path` is a folder: one file per writing rank with experts by id, and an index
};

// Saves a checkpoint of what the ranks hold together. Collective, over ranks that share a file
// system. Each tensor and each expert is written once, by the lowest rank that holds it. Every
// expert must be held by some rank, and whole tensors must not have the names of a block's parts.
//
// Nothing appears at `path` before everything is on disk. An existing checkpoint is replaced at
// once, and stays unchanged if anything fails; a replaced file keeps its mode. Only a regular file,
// or a folder that holds nothing but safetensors files and indices, is replaced. If another file
// appears in the folder meanwhile, the folder stays.
//
// Throws InvalidArgument for contents that cannot be saved, and StorageError for a file that cannot
// be written or a folder that holds other files. The error is the same on every rank, and the
// communicator stays usable. Its timeout must exceed the time that one rank needs to write.
//
// A killed process leaves a hidden file or folder ".NAME.tmp-…" beside `path`, which may be
// deleted. If the file system cannot exchange two names, `path` does not exist for a moment while a
// folder is replaced. A process killed at that moment leaves the old checkpoint as ".NAME.old-…";
// rename it to `path` to restore it. Parts of an old folder that cannot be deleted also stay under
// that name.
SWITCHYARD_API void save_checkpoint(Communicator& comm, const std::filesystem::path& path,
                                    const CheckpointContents& contents,
                                    CheckpointForm form = CheckpointForm::one_file);

// Copies the rank's part of the block under `prefix` into `into`. Not collective. The checkpoint
// may have any form and may come from any number of ranks. bf16 is widened to f32; f16 is converted
// exactly to f32, or rounded to nearest even as bf16. `into` is in the memory of `device`, which
// receives the bytes straight from the file, or in host memory. Reads only the rank's part, except
// that tensors their file does not align are copied whole. Returns when all tensors are complete.
//
// Throws InvalidArgument, naming a tensor that does not fit, or that only the checkpoint or only
// `into` has; throws Unsupported, naming a tensor that cannot be read. Nothing is written in either
// case. Throws StorageError if a file was truncated after it was opened; some tensors may then have
// been written. A truncated file instead ends the process with SIGBUS if its bytes are copied to a
// GPU or transposed (gpt-oss).
SWITCHYARD_API void load_block(const Checkpoint& checkpoint, std::string_view prefix,
                               const ExpertPlacement& placement, int rank, const MoeViews& into,
                               const Device& device = {});
// Copies one whole tensor into `into`, with the conversions and errors of load_block. Not
// collective.
SWITCHYARD_API void load_tensor(const Checkpoint& checkpoint, std::string_view name,
                                const TensorView& into, const Device& device = {});

}  // namespace switchyard
