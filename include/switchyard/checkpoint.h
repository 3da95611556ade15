// Checkpoints: named tensors in safetensors files, saved by some ranks and loaded by any others.
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

// A checkpoint that was opened and found whole. Its tensors are mapped: a rank reads only what it
// touches. Only read, so threads may share it; copies share the mapping.
class SWITCHYARD_API Checkpoint {
 public:
  // A safetensors file; an index in Hugging Face's form (*.safetensors.index.json); or a folder
  // that holds one index, or without any, safetensors files that have no tensor in common. Hidden
  // files do not count. A folder that is replaced meanwhile is opened as it was before or after,
  // never as parts of both. InvalidArgument says what is wrong with a file, and for an index names
  // the tensor that is not where it says, or the file that is missing. Tensors that an index does
  // not list are left out, and its total_size is not checked: systems differ in what they count.
  static Checkpoint open(const std::filesystem::path& path);
  Checkpoint(const Checkpoint&) = default;  // and no move, which would leave no contents behind
  Checkpoint& operator=(const Checkpoint&) = default;

  const std::filesystem::path& path() const;
  // Of the file; of an index, what its "metadata" holds, numbers as their JSON text; of files
  // without an index, what all of them say.
  const std::map<std::string, std::string>& metadata() const;
  // In order of name; each is mapped once.
  const std::vector<SafetensorsFile>& files() const;
  // Of the tensors whose names begin with `prefix`, ascending, including those that cannot be read.
  std::vector<std::string> names(std::string_view prefix = {}) const;
  // The one that holds the tensor. InvalidArgument if there is no such tensor.
  const SafetensorsFile& file_of(std::string_view name) const;

  // As SafetensorsFile::tensors, of all files; views keep their file's mapping alive. The first
  // call makes the views, and copies tensors that their file does not align to their elements.
  const NamedTensors& tensors() const;
  // As SafetensorsFile::tensor.
  ConstTensorView tensor(std::string_view name) const;

 private:
  struct Contents;
  explicit Checkpoint(std::shared_ptr<Contents> contents);

  std::shared_ptr<Contents> contents_;
};

// One rank's part of an MoE layer, or of what an optimizer keeps for one: saved under prefix + the
// names of from_hugging_face. Every rank has the router, and experts have the same tensors.
struct CheckpointBlock {
  std::string prefix;  // "model.layers.3.mlp."
  MoeWeights tensors;
  ExpertPlacement placement;
  int rank = 0;  // in the placement
};

// One rank's part of a checkpoint that is saved. Rows may lie apart. Tensors are in the memory of
// `device`, from which they come to the host 32 MiB at a time, or in the host's.
struct CheckpointContents {
  NamedTensors tensors = {};  // held whole by every rank that lists them, with the same bytes
  std::vector<CheckpointBlock> blocks = {};
  // Rank 0's is saved; Transformers wants a file to have "format": "pt", which is added.
  std::map<std::string, std::string> metadata = {};
  Device device = {};
};

enum class CheckpointForm {
  one_file,       // `path` is a safetensors file; experts are packed: [E, …]
  file_per_rank,  // `path` is a folder: a file for each rank that writes, experts by id, an index
};

// Collective, over ranks that share a file system. Every tensor, and every expert, is written once,
// by the lowest rank that holds it, and all experts must be there. Whole tensors must not have
// names of a block's parts. Nothing appears under `path` before everything is on the disk; what was
// there before is replaced at once, and stays as it is when anything fails. Only a regular file, or
// a folder that holds nothing but safetensors files and indices, is replaced: also when something
// else came into it meanwhile, the folder stays. A file keeps its mode. What cannot be saved is an
// InvalidArgument; an unwritable file, or a folder with other things, a StorageError: the same on
// every rank, and the communicator stays usable. Its timeout must exceed one rank's time to write.
//
// A process that is killed leaves a hidden file or folder ".NAME.tmp-…" beside `path`, which may be
// removed. Where the file system cannot exchange two names, there is no folder at `path` for a
// moment: a process that is killed then leaves the old checkpoint as ".NAME.old-…", and renaming
// that to `path` restores it. What cannot be removed of an old folder stays under that name too.
SWITCHYARD_API void save_checkpoint(Communicator& comm, const std::filesystem::path& path,
                                    const CheckpointContents& contents,
                                    CheckpointForm form = CheckpointForm::one_file);

// Copies the rank's part of the block under `prefix` into these tensors, whatever form and however
// many ranks it was saved with; bf16 widens to f32, and f16 becomes f32 exactly or bf16 rounded to
// nearest even. InvalidArgument names a tensor that does not fit, or that only the checkpoint or
// only `into` has, and Unsupported one that cannot be read; then nothing is written. Not
// collective; reads only that part, and where a file does not align its tensors, copies those that
// hold it. The tensors are in the memory of `device`, which they are copied to straight from the
// file, or in the host's. Returns when everything is there. A file that was shortened since it was
// opened is a StorageError, and some tensors may have been written; but where they are copied to a
// GPU, or transposed (gpt-oss), it ends the process as touching its views does.
SWITCHYARD_API void load_block(const Checkpoint& checkpoint, std::string_view prefix,
                               const ExpertPlacement& placement, int rank, const MoeViews& into,
                               const Device& device = {});
// As load_block, for one tensor that is whole.
SWITCHYARD_API void load_tensor(const Checkpoint& checkpoint, std::string_view name,
                                const TensorView& into, const Device& device = {});

}  // namespace switchyard
