// SPDX-License-Identifier: Apache-2.0
// The output of inspect: a table for people, or one JSON object per line.
#pragma once

#include <string>
#include <vector>

#include "inspect/fold_names.h"
#include "inspect/moe_blocks.h"

namespace switchyard::cli {

struct InspectReport {
  struct File {
    std::string path;
    std::int64_t bytes = 0;  // size of the tensors counted in num_tensors
    std::int64_t num_tensors = 0;
    std::int64_t num_unlisted = 0;  // in the file, but not in the index
  };
  struct Tensors {
    FoldedName names;
    TensorInfo info;  // the same for each of them
  };
  struct Blocks {
    FoldedName prefixes;
    FoundBlock block;  // the first of them
  };

  std::string path;
  std::map<std::string, std::string> metadata;
  std::vector<File> files;
  std::vector<Tensors> tensors;
  std::int64_t num_tensors = 0;
  std::int64_t bytes = 0;
  std::vector<Blocks> blocks;
  std::int64_t num_optimizer_blocks = 0;  // not included in `blocks`
  RankReads ranks;
  std::int64_t replicated_bytes = 0;          // bytes that every rank reads
  std::vector<std::string> not_counted = {};  // prefixes of blocks that are not whole
};

void print_inspect_table(const InspectReport& report);
void print_inspect_json(const InspectReport& report);

}  // namespace switchyard::cli
