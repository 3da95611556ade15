// SPDX-License-Identifier: Apache-2.0
// Checks that the values of options fit each other.
#include <fmt/format.h>

#include <utility>

#include "options/options.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

template <typename... Args>
void require(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) throw InvalidArgument(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace

void check(const ModelConfig& m) {
  require(m.hidden % m.heads == 0 && m.head_size() % 2 == 0,
          "--hidden {} must be --heads {} times an even number, such as {}", m.hidden, m.heads,
          (m.hidden / (2 * m.heads) + 1) * 2 * m.heads);
  require(m.top_k <= m.experts, "--top-k {} must be at most --experts {}", m.top_k, m.experts);
  require(m.moe_every <= m.layers,
          "--moe-every {} must be at most --layers {}: no layer has experts", m.moe_every,
          m.layers);
}

void check(const TrainConfig& config, int num_ranks) {
  check(config.model);
  const auto& o = config.optimizer;
  require(o.final_learning_rate <= o.learning_rate,
          "--final-learning-rate {} must be at most --learning-rate {}", o.final_learning_rate,
          o.learning_rate);
  mesh_axes(config.mesh, num_ranks);
}

void fit_mesh(TrainConfig& config, int num_ranks) {
  auto& mesh = config.mesh;
  if (mesh.ranks != 0 && mesh.ranks != num_ranks) mesh = {.expert_axes = mesh.expert_axes};
  mesh.ranks = num_ranks;
  check(config, num_ranks);
}

std::vector<MeshAxis> mesh_axes(const MeshConfig& config, int num_ranks) {
  const std::int64_t others = std::int64_t{config.dp} * config.sp;
  const std::int64_t left = num_ranks / others;
  const auto would_fit =
      left * others == num_ranks
          ? fmt::format("--ep {} would fit", left)
          : "choose --dp and --sp whose product divides the ranks, or give --ranks";
  require(config.ep == 0 || others * config.ep == num_ranks,
          "--dp {} × --ep {} × --sp {} are {} ranks, but there are {}; {}", config.dp, config.ep,
          config.sp, others * config.ep, num_ranks, would_fit);
  require(left * others == num_ranks,
          "--dp {} × --sp {} must divide the {} ranks; --ranks {} would do", config.dp, config.sp,
          num_ranks, (left + 1) * others);
  const int ep = config.ep == 0 ? static_cast<int>(left) : config.ep;
  return {{"dp", config.dp}, {"ep", ep}, {"sp", config.sp}};
}

}  // namespace switchyard::train
