#include "moe_blocks.h"

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "fold_names.h"
#include "switchyard/placement.h"

namespace switchyard::cli {
namespace {

constexpr std::int64_t kMostExperts = 65536;  // more is not a router

// The tensors under a prefix.
class Block {
 public:
  Block(const TensorInfos& tensors, std::string prefix)
      : tensors_(tensors), prefix_(std::move(prefix)) {}

  const std::string& prefix() const { return prefix_; }

  // Null if there is none, or not of so many extents.
  const TensorInfo* find(std::string_view name, std::size_t num_extents) const {
    const auto found = tensors_.find(prefix_ + std::string(name));
    const bool fits = found != tensors_.end() && found->second.shape.size() == num_extents;
    return fits ? &found->second : nullptr;
  }

  // Calls fn(name behind the stem, info) for every tensor under it.
  template <typename Fn>
  void for_each(std::string_view stem, const Fn& fn) const {
    const auto whole = prefix_ + std::string(stem);
    for (auto at = tensors_.lower_bound(whole);
         at != tensors_.end() && at->first.starts_with(whole); ++at) {
      fn(std::string_view(at->first).substr(whole.size()), at->second);
    }
  }

 private:
  const TensorInfos& tensors_;
  std::string prefix_;
};

void add(MoeBlock& result, std::string_view name, const TensorInfo& info) {
  result.expert_tensors.push_back(result.prefix + std::string(name));
  result.is_readable = result.is_readable && info.is_readable;
}

// `main` tells what the experts are: [e, …], with the intermediate extent at `dim`, `per` times.
void set_packed(MoeBlock& result, const TensorInfo& main, std::size_t dim, std::int64_t per) {
  result.num_held = main.shape[0];
  result.intermediate = main.shape[dim] / per;
  result.dtype = main.dtype;
}

// Every tensor of as many experts, so that scales and biases are among them.
void add_packed(MoeBlock& result, const Block& block) {
  block.for_each("experts.", [&](std::string_view name, const TensorInfo& info) {
    if (info.shape.empty() || info.shape[0] != result.num_held) return;
    add(result, "experts." + std::string(name), info);
    result.packed_bytes += info.bytes;
  });
}

bool has_packed(MoeBlock& result, const Block& block) {
  const auto* gate_up = block.find("experts.gate_up_proj", 3);
  if (gate_up == nullptr) return false;
  set_packed(result, *gate_up, 1, 2);
  result.layout = "Hugging Face, packed";
  add_packed(result, block);
  return true;
}

bool has_gpt_oss(MoeBlock& result, const Block& block) {
  if (const auto* gate_up = block.find("experts.gate_up_proj", 3)) {
    set_packed(result, *gate_up, 2, 2);
    result.layout = "gpt-oss, packed";
  } else if (const auto* blocks = block.find("experts.gate_up_proj_blocks", 4)) {
    set_packed(result, *blocks, 1, 2);
    result.layout = "gpt-oss, quantized";
  } else {
    return false;
  }
  add_packed(result, block);
  return true;
}

bool has_kempner_forge(MoeBlock& result, const Block& block) {
  const auto* up = block.find("up_w", 3);
  if (up == nullptr) return false;
  set_packed(result, *up, 2, 1);
  result.layout = "KempnerForge, packed";
  for (const auto* name : {"up_w", "gate_w", "down_w"}) {
    if (const auto* info = block.find(name, 3)) {
      add(result, name, *info);
      result.packed_bytes += info->bytes;
    }
  }
  return true;
}

bool has_separate(MoeBlock& result, const Block& block, std::string_view system) {
  block.for_each("experts.", [&](std::string_view name, const TensorInfo& info) {
    const auto dot = name.find('.');
    const auto id = number_in(name.substr(0, dot));
    if (id < 0 || id >= result.num_experts || dot == std::string_view::npos) return;
    const auto matrix = name.substr(dot + 1);
    const bool is_mixtral = matrix == "w3.weight";
    if ((is_mixtral || matrix == "up_proj.weight") && info.shape.size() == 2) {
      result.intermediate = info.shape[0];
      result.dtype = info.dtype;
      result.layout = std::string(is_mixtral ? "Mixtral" : system) + ", by expert";
    }
    add(result, "experts." + std::string(name), info);
    result.bytes_of_expert[id] += info.bytes;
  });
  result.num_held = static_cast<std::int64_t>(result.bytes_of_expert.size());
  return !result.layout.empty();
}

struct Names {
  std::string_view router;
  std::string_view gate_bias;
  std::string_view score_bias;
  std::string_view shared;
};
constexpr std::array<Names, 3> kNames{
    Names{"router.gate.weight", "", "router.expert_bias", "shared_expert.up_proj.weight"},
    Names{"router.weight", "router.bias", "", ""},
    Names{"gate.weight", "", "gate.e_score_correction_bias", "shared_experts.up_proj.weight"}};

bool has_experts(MoeBlock& result, const Block& block, const Names& names) {
  if (names.router == "router.weight") return has_gpt_oss(result, block);
  if (names.router == "gate.weight") {
    return has_packed(result, block) || has_separate(result, block, "Hugging Face");
  }
  return has_kempner_forge(result, block) || has_separate(result, block, "KempnerForge");
}

std::optional<MoeBlock> block_of(const TensorInfos& tensors, const std::string& router,
                                 const Names& names) {
  const Block block(tensors, router.substr(0, router.size() - names.router.size()));
  const auto* gate = block.find(names.router, 2);
  if (gate == nullptr || gate->shape[0] < 1 || gate->shape[0] > kMostExperts) return std::nullopt;
  MoeBlock result{.prefix = block.prefix(),
                  .num_experts = gate->shape[0],
                  .hidden = gate->shape[1],
                  .is_readable = gate->is_readable};
  if (!has_experts(result, block, names)) return std::nullopt;
  if (block.find(names.gate_bias, 1) != nullptr) result.bias.emplace_back("gate");
  if (block.find(names.score_bias, 1) != nullptr) result.bias.emplace_back("score");
  if (const auto* shared = block.find(names.shared, 2)) {
    result.shared_intermediate = shared->shape[0];
    result.is_readable = result.is_readable && shared->is_readable;
  }
  return result;
}

bool is_router(std::string_view name, std::string_view router) {
  return name == router || (name.ends_with(router) && name[name.size() - router.size() - 1] == '.');
}

}  // namespace

std::int64_t MoeBlock::bytes_of(std::int64_t first, std::int64_t last) const {
  std::int64_t bytes = packed_bytes / num_experts * (last - first);
  for (auto at = bytes_of_expert.lower_bound(first);
       at != bytes_of_expert.end() && at->first < last; ++at) {
    bytes += at->second;
  }
  return bytes;
}

std::vector<MoeBlock> find_moe_blocks(const TensorInfos& tensors) {
  std::vector<MoeBlock> result;
  for (const auto& [name, info] : tensors) {
    for (const Names& names : kNames) {
      if (!is_router(name, names.router)) continue;
      if (auto block = block_of(tensors, name, names)) result.push_back(std::move(*block));
    }
  }
  return result;
}

std::vector<RankReads> reads_of_ranks(const std::vector<MoeBlock>& blocks, int num_ranks) {
  std::map<std::int64_t, std::vector<const MoeBlock*>> blocks_by_size;
  for (const MoeBlock& block : blocks) {
    if (block.is_whole()) blocks_by_size[block.num_experts].push_back(&block);
  }
  std::vector<RankReads> result(static_cast<std::size_t>(num_ranks));
  for (const auto& [num_experts, members] : blocks_by_size) {
    const auto placement = ExpertPlacement::contiguous(static_cast<int>(num_experts), num_ranks);
    std::int64_t first = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto last = first + static_cast<std::int64_t>(placement.experts_of(rank).size());
      auto& reads = result[static_cast<std::size_t>(rank)];
      reads.experts.push_back({num_experts, first, last});
      for (const auto* block : members) reads.expert_bytes += block->bytes_of(first, last);
      first = last;
    }
  }
  return result;
}

}  // namespace switchyard::cli
