// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_plan.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/safetensors_header.h"

namespace switchyard {
namespace {

constexpr int kNobody = -1;

std::string_view name_of(CheckpointForm form) {
  return form == CheckpointForm::one_file ? "one_file" : "file_per_rank";
}

void require_same_call(std::span<const CheckpointRecord> records) {
  const auto& first = records.front();
  for (std::size_t r = 1; r < records.size(); ++r) {
    require(records[r].path == first.path, "path is {} on rank 0, but {} on rank {}",
            in_quotes(first.path), in_quotes(records[r].path), r);
    require(records[r].form == first.form, "form is {} on rank 0, but {} on rank {}",
            name_of(first.form), name_of(records[r].form), r);
  }
}

void add_whole_tensors(CheckpointPlan& plan, const CheckpointRecord& record, int rank) {
  for (const auto& [name, form] : record.tensors) {
    const auto& planned = plan.tensors.emplace(name, PlannedTensor{form, rank}).first->second;
    if (planned.form == form) continue;
    throw InvalidArgument(fmt::format("tensor {} is {} on rank {}, but {} on rank {}",
                                      in_quotes(name), planned.form.to_string(), planned.rank,
                                      form.to_string(), rank));
  }
}

// Loading would mistake such a tensor for a part of the block.
void require_no_parts(std::span<const CheckpointRecord> records, const std::string& prefix) {
  for (const std::string_view part :
       {"experts.", "router.", "gate.", "shared_experts.", "shared_expert_gate."}) {
    const auto begin = prefix + std::string(part);
    for (std::size_t r = 0; r < records.size(); ++r) {
      const auto& [tensors, of_blocks] = std::tie(records[r].tensors, records[r].of_blocks);
      for (auto at = tensors.lower_bound(begin); at != tensors.end(); ++at) {
        if (!at->first.starts_with(begin)) break;
        require(of_blocks.contains(at->first),
                "tensor {} is given by rank {}, but names that begin with {} belong to block {}",
                in_quotes(at->first), r, in_quotes(begin), in_quotes(prefix));
      }
    }
  }
}

// The facts about a block that are known so far, and the ranks they came from.
struct AgreedBlock {
  BlockRecord record;
  int rank = 0;
  int forms_rank = kNobody;
  std::vector<int> owners;
};
using AgreedBlocks = std::map<std::string, AgreedBlock>;

void add_experts(AgreedBlock& agreed, const BlockRecord& block, const std::string& prefix,
                 int rank) {
  if (block.ids.empty()) return;
  if (agreed.forms_rank == kNobody) {
    agreed.forms_rank = rank;
    agreed.record.forms = block.forms;
  }
  for (std::size_t t = 0; t < kNumExpertTensors; ++t) {
    const auto& known = agreed.record.forms[t];
    if (block.forms[t] == known) continue;
    throw InvalidArgument(
        fmt::format("{}experts.{}.{} is {} on rank {}, but experts have {} on rank {}", prefix,
                    block.ids.front(), kExpertTensorNames[t], words_for(block.forms[t]), rank,
                    known ? known->to_string() : "none", agreed.forms_rank));
  }
  for (const auto id : block.ids) {
    auto& owner = agreed.owners[static_cast<std::size_t>(id)];
    if (owner == kNobody) owner = rank;
  }
}

AgreedBlocks agree_on_blocks(std::span<const CheckpointRecord> records) {
  AgreedBlocks blocks;
  for (std::size_t r = 0; r < records.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (const auto& [prefix, block] : records[r].blocks) {
      const std::vector<int> nobody(static_cast<std::size_t>(block.num_experts), kNobody);
      auto& agreed =
          blocks.emplace(prefix, AgreedBlock{block, rank, kNobody, nobody}).first->second;
      require(block.num_experts == agreed.record.num_experts,
              "block {} has {} experts on rank {}, but {} on rank {}", in_quotes(prefix),
              agreed.record.num_experts, agreed.rank, block.num_experts, rank);
      add_experts(agreed, block, prefix, rank);
    }
  }
  return blocks;
}

void require_all_experts(const AgreedBlock& block, const std::string& prefix) {
  std::vector<std::int64_t> missing;
  std::set<int> holders;
  for (std::size_t id = 0; id < block.owners.size(); ++id) {
    if (block.owners[id] == kNobody) missing.push_back(static_cast<std::int64_t>(id));
    if (block.owners[id] != kNobody) holders.insert(block.owners[id]);
  }
  if (missing.empty()) return;
  throw InvalidArgument(fmt::format(
      "no rank holds expert{} {} of the {} of block {}; ranks with others: {}",
      missing.size() > 1 ? "s" : "", fmt::join(missing, ", "), block.owners.size(),
      in_quotes(prefix), holders.empty() ? "none" : fmt::format("{}", fmt::join(holders, ", "))));
}

void add_block(CheckpointPlan& plan, const std::string& prefix, const AgreedBlock& block,
               CheckpointForm form) {
  for (std::size_t id = 0; id < block.owners.size(); ++id) {
    for (std::size_t t = 0; t < kNumExpertTensors; ++t) {
      if (!block.record.forms[t]) continue;
      const auto place = place_of(prefix, block.record, static_cast<std::int64_t>(id), t, form);
      plan.tensors.emplace(place.name, PlannedTensor{place.whole, block.owners[id]});
    }
  }
  plan.owners[prefix] = block.owners;
}

ExpertPlace packed_place(std::string_view prefix, const BlockRecord& block, std::int64_t id,
                         std::size_t tensor) {
  const bool gated = block.forms[kGate].has_value();
  const bool is_bias = tensor >= kGateBias;
  const bool is_down = tensor == kDown || tensor == kDownBias;
  const bool is_up = tensor == kUp || tensor == kUpBias;
  const auto& own = *block.forms[tensor];
  const auto rows = own.shape[0] * (gated && !is_down ? 2 : 1);
  const Shape shape =
      is_bias ? Shape{block.num_experts, rows} : Shape{block.num_experts, rows, own.shape[1]};
  const TensorForm whole{own.dtype, shape};
  const auto* const name = is_down ? "down_proj" : gated ? "gate_up_proj" : "up_proj";
  const auto before_up = gated && is_up ? own.bytes() : 0;
  return {fmt::format("{}experts.{}{}", prefix, name, is_bias ? "_bias" : ""), whole,
          id * (whole.bytes() / block.num_experts) + before_up};
}

}  // namespace

ExpertPlace place_of(std::string_view prefix, const BlockRecord& block, std::int64_t id,
                     std::size_t tensor, CheckpointForm form) {
  if (form == CheckpointForm::one_file) return packed_place(prefix, block, id, tensor);
  return {expert_stem(prefix, id) + std::string(kExpertTensorNames[tensor]), *block.forms[tensor],
          0};
}

CheckpointPlan plan_checkpoint(std::span<const CheckpointRecord> records) {
  require_same_call(records);
  CheckpointPlan plan;
  for (std::size_t r = 0; r < records.size(); ++r) {
    add_whole_tensors(plan, records[r], static_cast<int>(r));
  }
  for (const auto& [prefix, block] : agree_on_blocks(records)) {
    require_all_experts(block, prefix);
    require_no_parts(records, prefix);
    add_block(plan, prefix, block, records.front().form);
  }
  return plan;
}

}  // namespace switchyard
