// SPDX-License-Identifier: Apache-2.0
#include "run/resources.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "common/bounded_count.h"
#include "model/model_size.h"
#include "options/options.h"
#include "switchyard/error.h"
#include "switchyard/sequence.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFloat = sizeof(float);
constexpr std::int64_t kKilobyte = 1024;
constexpr std::int64_t kBetweenTwoRanks = 24 * 1024;  // measured with 100 to 400 ranks
constexpr std::int64_t kOfARank = 1 << 20;            // its threads and their caches, measured
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

int expert_ranks_of(const MeshConfig& mesh, int num_ranks) {
  const auto axes = mesh_axes(mesh, num_ranks);
  return axes[1].size * (mesh.expert_axes.size() > 1 ? axes[2].size : 1);
}

// Every rank creates the whole model before it frees the parameters that other ranks own.
std::int64_t parameter_bytes(const ModelConfig& config, const Spread& spread, int expert_ranks,
                             int num_sets) {
  const ModelSize size = size_of(config);
  const BoundedCount own = size.parameters - size.in_experts + size.in_experts / expert_ranks;
  const auto most = std::max(size.parameters, (own * num_sets).value());
  return (BoundedCount(most) * kFloat * spread.ranks_here).value();
}

// Returns the floats that a token and its picks keep, over all layers.
BoundedCount step_floats(const ModelConfig& c) {
  const BoundedCount h = c.hidden;
  const BoundedCount with_experts = c.layers / c.moe_every;
  const BoundedCount without = c.layers - c.layers / c.moe_every;
  return c.layers * (8 * h) +  // inputs, normed rows, queries, keys, values, mixed
         with_experts * (2 * c.intermediate * BoundedCount(c.top_k) + 2 * c.shared_intermediate) +
         without * (2 * BoundedCount(c.dense_intermediate)) + 3 * h + kVocabulary;
}

BoundedCount between_ranks(const Spread& spread) {
  return BoundedCount(spread.ranks) * spread.ranks_here * kBetweenTwoRanks +
         BoundedCount(spread.ranks_here) * kOfARank;
}

// Returns the number after `name` at the start of a line, or the file's first number if `name` is
// empty. Returns nullopt if there is none.
std::optional<std::int64_t> number_in(const fs::path& path, std::string_view name = {}) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(name.size()));
    std::int64_t number = 0;
    if (words >> number) return number;
  }
  return std::nullopt;
}

std::int64_t left_by(const fs::path& group, const char* limit_name, const char* usage_name,
                     std::string_view cached) {
  const auto limit = number_in(group / limit_name);
  const auto usage = number_in(group / usage_name);
  if (!limit || !usage) return kUnlimited;
  const auto reclaimed = number_in(group / "memory.stat", cached).value_or(0);
  return std::max<std::int64_t>(0, *limit - *usage + std::min(*usage, reclaimed));
}

// Returns the memory left in a control group, limited by all of its ancestors.
std::int64_t left_by_groups(const fs::path& mount, std::string path, bool is_unified) {
  std::int64_t left = kUnlimited;
  for (;;) {
    const auto group = mount / fs::path(path).relative_path();
    left =
        std::min(left, is_unified ? left_by(group, "memory.max", "memory.current", "inactive_file ")
                                  : left_by(group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                            "total_inactive_file "));
    if (path.empty() || path == "/") return left;
    path = fs::path(path).parent_path().string();
  }
}

std::string in_gigabytes(std::int64_t bytes) {
  return fmt::format("{:.1f} GB", static_cast<double>(bytes) * 1e-9);
}

}  // namespace

std::int64_t MemoryNeed::total() const {
  return (BoundedCount(parameters) + step + text + between_ranks).value();
}

MemoryNeed memory_of_training(const TrainConfig& config, const Spread& spread,
                              std::int64_t text_bytes) {
  constexpr int kSets = 4;  // values, gradients and two moments
  const auto expert_ranks = expert_ranks_of(config.mesh, spread.ranks);
  const auto tokens = BoundedCount(config.data.batch) * config.model.context;
  const auto tokens_here = tokens.value() / spread.ranks * spread.ranks_here;
  return {.parameters = parameter_bytes(config.model, spread, expert_ranks, kSets),
          .step = (BoundedCount(tokens_here) * step_floats(config.model) * kFloat).value(),
          .text = (BoundedCount(text_bytes) * spread.texts_here).value(),
          .between_ranks = between_ranks(spread).value()};
}

MemoryNeed memory_of_sampling(const ModelConfig& config, const Spread& spread,
                              std::int64_t tokens) {
  constexpr int kSets = 2;  // values, and the gradients that a model always has
  const BoundedCount of_a_token = 8 * BoundedCount(config.hidden) + kVocabulary;
  return {.parameters = parameter_bytes(config, spread, spread.ranks, kSets),
          .step = (of_a_token * tokens * kFloat).value(),
          .between_ranks = between_ranks(spread).value()};
}

std::int64_t peak_memory(const fs::path& root) {
  return number_in(root / "proc/self/status", "VmHWM:").value_or(0) * kKilobyte;
}

std::int64_t available_memory(const fs::path& root) {
  const auto meminfo = root / "proc/meminfo";
  std::int64_t available = kUnlimited;
  if (const auto free = number_in(meminfo, "MemAvailable:")) {
    available = (*free + number_in(meminfo, "SwapFree:").value_or(0)) * kKilobyte;
  }
  // Lines look like "0::/user.slice" (unified hierarchy) or "5:memory:/docker/17" (memory
  // controller).
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const auto path = line.substr(second + 1);
    const auto mount = root / "sys/fs/cgroup";
    if (controllers == ",,") available = std::min(available, left_by_groups(mount, path, true));
    if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, left_by_groups(mount / "memory", path, false));
    }
  }
  return available;
}

void require_memory(const MemoryNeed& need, std::int64_t available, std::string_view who) {
  if (need.total() <= available) return;
  throw Unsupported(fmt::format(
      "{} would need about {} of memory, but {} are available; parameters and their training state "
      "need {}, a step {}, the text {}, and buffers for exchanges between ranks {}",
      who, in_gigabytes(need.total()), in_gigabytes(available), in_gigabytes(need.parameters),
      in_gigabytes(need.step), in_gigabytes(need.text), in_gigabytes(need.between_ranks)));
}

int num_idle_ranks(const TrainConfig& config, int num_ranks) {
  const auto axes = mesh_axes(config.mesh, num_ranks);
  const std::int64_t ep = axes[1].size;
  const std::int64_t sp = axes[2].size;
  const std::int64_t shares = axes[0].size * ep;
  const bool sp_has_experts = config.mesh.expert_axes.size() > 1;
  int idle = 0;
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
    const auto share = rank / sp;
    const auto along_sp = rank % sp;
    const auto sequences =
        config.data.batch * (share + 1) / shares - config.data.batch * share / shares;
    const SequenceShard shard(sequences, config.model.context, static_cast<int>(sp),
                              static_cast<int>(along_sp));
    const auto expert_rank = sp_has_experts ? share % ep * sp + along_sp : share % ep;
    if (shard.num_tokens() == 0 && expert_rank >= config.model.experts) ++idle;
  }
  return idle;
}

}  // namespace switchyard::train
