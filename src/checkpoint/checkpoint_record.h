// What one rank brings to a checkpoint, as it tells the others.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/block_names.h"
#include "io/safetensors_writer.h"
#include "switchyard/checkpoint.h"

namespace switchyard {

// In the order of kExpertTensorNames; none: experts do not have it.
using ExpertForms = std::array<std::optional<TensorForm>, kNumExpertTensors>;
// "f32 [2,3]" or "missing".
std::string words_for(const std::optional<TensorForm>& form);

struct BlockRecord {
  int num_experts = 0;            // of the placement
  std::vector<std::int32_t> ids;  // of the rank's
  ExpertForms forms;              // of each of these; of no meaning without any
};

struct CheckpointRecord {
  std::string path;  // absolute, without a slash at its end
  CheckpointForm form = CheckpointForm::one_file;
  std::string token;  // rank 0's names the temporary
  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorForm> tensors;  // held whole, those of blocks among them
  std::map<std::string, BlockRecord> blocks;  // by prefix
  std::set<std::string> of_blocks = {};       // those of `tensors` that blocks brought
};

// Throws InvalidArgument if something cannot be saved.
CheckpointRecord record_of(const std::filesystem::path& path, const CheckpointContents& contents,
                           CheckpointForm form);

// Collective: every rank's.
std::vector<CheckpointRecord> gather_records(Communicator& comm, const CheckpointRecord& own);

}  // namespace switchyard
