// SPDX-License-Identifier: Apache-2.0
#include "inspect/moe_blocks.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoints/checkpoints.h"
#include "inspect/fold_names.h"

namespace switchyard::cli {
namespace {

constexpr std::int64_t kMostExperts = 65536;  // with more rows, the matrix is not a router

// Returns the position of the dot after the first `num_parts` parts of a name.
std::size_t end_of_parts(std::string_view name, int num_parts) {
  auto end = name.find('.');
  for (int i = 1; i < num_parts && end != std::string_view::npos; ++i) {
    end = name.find('.', end + 1);
  }
  return end;
}

// The tensors under a prefix.
class Block {
 public:
  Block(const TensorInfos& tensors, std::string prefix)
      : tensors_(tensors), prefix_(std::move(prefix)) {}

  const std::string& prefix() const { return prefix_; }

  // Returns null if the name is empty, or if there is no such tensor with that many extents.
  const TensorInfo* find(std::string_view name, std::size_t num_extents) const {
    if (name.empty()) return nullptr;
    const auto found = tensors_.find(prefix_ + std::string(name));
    const bool fits = found != tensors_.end() && found->second.shape.size() == num_extents;
    return fits ? &found->second : nullptr;
  }

  // Calls fn(name after the stem, info) for every tensor under the stem whose name there has at
  // most `most_parts` parts. Skips deeper names in one jump, so nested blocks cost no more.
  template <typename Fn>
  void for_each(std::string_view stem, int most_parts, const Fn& fn) const {
    const auto whole = prefix_ + std::string(stem);
    auto at = tensors_.lower_bound(whole);
    while (at != tensors_.end() && at->first.starts_with(whole)) {
      const auto name = std::string_view(at->first).substr(whole.size());
      const auto end = end_of_parts(name, most_parts);
      if (end == std::string_view::npos) {
        fn(name, at->second);
        ++at;
      } else {
        constexpr char kBehindDot = '.' + 1;
        at = tensors_.lower_bound(at->first.substr(0, whole.size() + end) + kBehindDot);
      }
    }
  }

 private:
  const TensorInfos& tensors_;
  std::string prefix_;
};

// A name that conversions need, and the number of extents of its tensor.
struct Needed {
  std::string_view name;
  std::size_t num_extents;
};

void note_missing(FoundBlock& result, const Block& block, std::initializer_list<Needed> names) {
  for (const auto& [name, num_extents] : names) {
    if (block.find(name, num_extents) == nullptr) result.missing.emplace_back(name);
  }
}

void add(FoundBlock& result, std::string_view name, const TensorInfo& info) {
  result.expert_tensors.push_back(result.prefix + std::string(name));
  result.is_readable = result.is_readable && info.is_readable;
}

// Describes the experts by `main` [e, …], whose extent `dim` is `per` times the intermediate size.
void set_packed(FoundBlock& result, const TensorInfo& main, std::size_t dim, std::int64_t per) {
  result.num_held = main.shape[0];
  result.intermediate = main.shape[dim] / per;
  result.dtype = main.dtype;
}

// Adds every tensor with as many experts, and so their scales and biases too.
void add_packed(FoundBlock& result, const Block& block) {
  block.for_each("experts.", 1, [&](std::string_view name, const TensorInfo& info) {
    if (info.shape.empty() || info.shape[0] != result.num_held) return;
    add(result, "experts." + std::string(name), info);
    result.packed_bytes += info.bytes;
  });
}

bool has_packed(FoundBlock& result, const Block& block) {
  if (const auto* gate_up = block.find("experts.gate_up_proj", 3)) {
    set_packed(result, *gate_up, 1, 2);
  } else if (const auto* up = block.find("experts.up_proj", 3)) {
    set_packed(result, *up, 1, 1);  // experts without gates
  } else {
    return false;
  }
  result.layout = "Hugging Face, packed";
  add_packed(result, block);
  note_missing(result, block, {{"experts.down_proj", 3}});
  return true;
}

bool has_gpt_oss(FoundBlock& result, const Block& block) {
  if (const auto* gate_up = block.find("experts.gate_up_proj", 3)) {
    set_packed(result, *gate_up, 2, 2);
    result.layout = "gpt-oss, packed";
    note_missing(result, block, {{"experts.down_proj", 3}});
  } else if (const auto* blocks = block.find("experts.gate_up_proj_blocks", 4)) {
    set_packed(result, *blocks, 1, 2);
    result.layout = "gpt-oss, quantized";
    note_missing(result, block,
                 {{"experts.gate_up_proj_scales", 3},
                  {"experts.down_proj_blocks", 4},
                  {"experts.down_proj_scales", 3}});
  } else {
    return false;
  }
  add_packed(result, block);
  note_missing(
      result, block,
      {{"experts.gate_up_proj_bias", 2}, {"experts.down_proj_bias", 2}, {"router.bias", 1}});
  return true;
}

bool has_kempner_forge(FoundBlock& result, const Block& block) {
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
  note_missing(result, block, {{"down_w", 3}});
  return true;
}

// The matrices of an expert that has its own tensors: gate, up and down.
constexpr std::array<std::string_view, 3> kProjections{"gate_proj.weight", "up_proj.weight",
                                                       "down_proj.weight"};
constexpr std::array<std::string_view, 3> kMixtral{"w1.weight", "w3.weight", "w2.weight"};
using Matrices = std::array<bool, 3>;  // which of the three exist

// Counts the complete experts and notes missing matrices. If any expert has a gate, all need one.
void count_held(FoundBlock& result, const std::map<std::int64_t, Matrices>& experts,
                const std::array<std::string_view, 3>& names) {
  const bool gated =
      std::ranges::any_of(experts, [](const auto& expert) { return expert.second[0]; });
  for (const auto& [id, there] : experts) {
    const auto before = result.missing.size();
    for (std::size_t m = gated ? 0 : 1; m < names.size(); ++m) {
      if (there[m]) continue;
      result.missing.push_back("experts." + std::to_string(id) + "." + std::string(names[m]));
    }
    result.num_held += result.missing.size() == before ? 1 : 0;
  }
}

bool has_separate(FoundBlock& result, const Block& block, std::string_view system) {
  constexpr int kMostParts = 4;  // as in 7.up_proj.weight, and one to spare
  std::map<std::int64_t, Matrices> experts;
  bool is_mixtral = false;
  block.for_each("experts.", kMostParts, [&](std::string_view name, const TensorInfo& info) {
    const auto dot = name.find('.');
    const auto id = number_in(name.substr(0, dot));
    if (id < 0 || id >= result.num_experts || dot == std::string_view::npos) return;
    const auto matrix = name.substr(dot + 1);
    auto& there = experts[id];
    for (std::size_t m = 0; m < there.size(); ++m) {
      there[m] = there[m] || matrix == kProjections[m] || matrix == kMixtral[m];
    }
    if ((matrix == kMixtral[1] || matrix == kProjections[1]) && info.shape.size() == 2) {
      is_mixtral = matrix == kMixtral[1];
      result.intermediate = info.shape[0];
      result.dtype = info.dtype;
      result.layout = std::string(is_mixtral ? "Mixtral" : system) + ", by expert";
    }
    add(result, "experts." + std::string(name), info);
    result.bytes_of_expert[id] += info.bytes;
  });
  if (result.layout.empty()) return false;
  count_held(result, experts, is_mixtral ? kMixtral : kProjections);
  return true;
}

struct Names {
  std::string_view router;
  std::string_view gate_bias;
  std::string_view score_bias;
};
constexpr std::array<Names, 3> kNames{
    Names{"router.gate.weight", "", "router.expert_bias"},
    Names{"router.weight", "router.bias", ""},
    Names{"gate.weight", "gate.bias", "gate.e_score_correction_bias"}};

void add_shared(FoundBlock& result, const Block& block) {
  for (const std::string stem : {"shared_expert.", "shared_experts."}) {
    bool is_there = false;
    block.for_each(stem, 2, [&](std::string_view, const TensorInfo& info) {
      is_there = true;
      result.is_readable = result.is_readable && info.is_readable;
    });
    if (!is_there) continue;
    const auto up = stem + std::string(kProjections[1]);
    const auto down = stem + std::string(kProjections[2]);
    note_missing(result, block, {{up, 2}, {down, 2}});
    if (const auto* info = block.find(up, 2)) result.shared_intermediate = info->shape[0];
  }
}

bool has_experts(FoundBlock& result, const Block& block, const Names& names) {
  if (names.router == "router.weight") return has_gpt_oss(result, block);
  if (names.router == "gate.weight") {
    return has_packed(result, block) || has_separate(result, block, "Hugging Face");
  }
  return has_kempner_forge(result, block) || has_separate(result, block, "KempnerForge");
}

std::optional<FoundBlock> block_of(const TensorInfos& tensors, const std::string& router,
                                   const Names& names) {
  const Block block(tensors, router.substr(0, router.size() - names.router.size()));
  const auto* gate = block.find(names.router, 2);
  if (gate == nullptr || gate->shape[0] < 1 || gate->shape[0] > kMostExperts) return std::nullopt;
  FoundBlock result{.prefix = block.prefix(),
                    .num_experts = gate->shape[0],
                    .hidden = gate->shape[1],
                    .is_readable = gate->is_readable};
  if (!has_experts(result, block, names)) return std::nullopt;
  if (block.find(names.gate_bias, 1) != nullptr) result.bias.emplace_back("gate");
  if (block.find(names.score_bias, 1) != nullptr) result.bias.emplace_back("score");
  add_shared(result, block);
  return result;
}

// Returns the owner of an expert if experts are placed contiguously: the first `more` ranks have
// one more than the others.
std::size_t owner_of(std::int64_t expert, std::int64_t num_experts, std::int64_t num_ranks) {
  const auto least = num_experts / num_ranks;
  const auto more = num_experts % num_ranks;
  const auto of_those = more * (least + 1);
  const auto owner = expert < of_those ? expert / (least + 1) : more + (expert - of_those) / least;
  return static_cast<std::size_t>(owner);
}

bool is_router(std::string_view name, std::string_view router) {
  return name == router || (name.ends_with(router) && name[name.size() - router.size() - 1] == '.');
}

}  // namespace

bool FoundBlock::is_optimizers() const { return prefix.starts_with(train::kOptimizerPrefix); }

std::vector<FoundBlock> find_moe_blocks(const TensorInfos& tensors) {
  std::vector<FoundBlock> result;
  for (const auto& [name, info] : tensors) {
    for (const Names& names : kNames) {
      if (!is_router(name, names.router)) continue;
      if (auto block = block_of(tensors, name, names)) result.push_back(std::move(*block));
    }
  }
  return result;
}

RankReads::Experts RankReads::experts_of(std::int64_t num_experts, std::int64_t rank) const {
  const auto num_ranks = static_cast<std::int64_t>(expert_bytes.size());
  const auto first_of = [&](std::int64_t r) {
    return num_experts / num_ranks * r + std::min(num_experts % num_ranks, r);
  };
  return {num_experts, first_of(rank), first_of(rank + 1)};
}

RankReads reads_of_ranks(const std::vector<FoundBlock>& blocks, int num_ranks) {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  RankReads result{.expert_bytes = std::vector<std::int64_t>(ranks)};
  std::set<std::int64_t> sizes;
  std::int64_t everywhere = 0;             // bytes of packed experts that every rank reads
  std::vector<std::int64_t> until(ranks);  // additional bytes that only ranks before this one read
  for (const FoundBlock& block : blocks) {
    if (!block.is_whole()) continue;
    sizes.insert(block.num_experts);
    const auto of_each = block.packed_bytes / block.num_experts;
    everywhere += of_each * (block.num_experts / num_ranks);
    until[static_cast<std::size_t>(block.num_experts % num_ranks)] += of_each;
    for (const auto& [id, bytes] : block.bytes_of_expert) {
      result.expert_bytes[owner_of(id, block.num_experts, num_ranks)] += bytes;
    }
  }
  std::int64_t of_later = 0;
  for (std::size_t rank = ranks; rank-- > 0;) {
    result.expert_bytes[rank] += everywhere + of_later;
    of_later += until[rank];
  }
  result.sizes.assign(sizes.begin(), sizes.end());
  return result;
}

}  // namespace switchyard::cli
