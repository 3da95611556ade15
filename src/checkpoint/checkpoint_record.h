// SPDX-License-Identifier: Apache-2.0
// The record of a rank's contribution to a checkpoint, which it sends to the other ranks.
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

// In the order of kExpertTensorNames. Empty if the experts do not have the tensor.
using ExpertForms = std::array<std::optional<TensorForm>, kNumExpertTensors>;
// Returns "f32 [2,3]", for example, or "missing".
std::string words_for(const std::optional<TensorForm>& form);

struct BlockRecord {
  int num_experts = 0;            // in the placement
  std::vector<std::int32_t> ids;  // this rank's experts
  ExpertForms forms;              // the same for each expert in `ids`; unused if there are none
};

struct CheckpointRecord {
  std::string path;  // absolute, without a trailing slash
  CheckpointForm form = CheckpointForm::one_file;
  std::string token;  // rank 0's token names the temporary file or folder
  std::map<std::string, std::string> metadata;
  std::map<std::string, TensorForm> tensors;  // held whole, including those of blocks
  std::map<std::string, BlockRecord> blocks;  // by prefix
  std::set<std::string> of_blocks = {};       // the names in `tensors` that come from blocks
};

// Throws InvalidArgument if something cannot be saved.
CheckpointRecord record_of(const std::filesystem::path& path, const CheckpointContents& contents,
                           CheckpointForm form);

// Collective. Returns the records of all ranks.
std::vector<CheckpointRecord> gather_records(Communicator& comm, const CheckpointRecord& own);

}  // namespace switchyard
