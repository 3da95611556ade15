// SPDX-License-Identifier: Apache-2.0
#include "soak/soak_case.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace switchyard::cli {
namespace {

constexpr int kMostRanks = 8;
// Limits a layer's multiplications for all tokens, so that a step with the oracle takes only some
// tenths of a second.
constexpr std::int64_t kMostWork = 1 << 20;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t draw_width(Draw& draw) {
  switch (draw.below(4)) {
    case 0:
      return draw.between(1, 8);
    case 1:
      return draw.pick<std::int64_t>({16, 32, 64, 128});
    default:
      return draw.between(9, 80);
  }
}

std::int64_t draw_tokens(Draw& draw, std::int64_t most) {
  if (draw.one_in(6)) return 0;
  if (draw.one_in(4)) return std::min<std::int64_t>(most, draw.between(1, 3));
  return draw.between(1, std::max<std::int64_t>(1, most));
}

RouterOptions draw_router(Draw& draw) {
  RouterOptions router;
  router.num_experts =
      static_cast<int>(draw.one_in(8) ? draw.between(17, 40) : draw.between(1, 16));
  router.top_k = draw.between(1, std::min(6, router.num_experts));
  router.score = draw.pick({ScoreFunction::softmax, ScoreFunction::sigmoid});
  router.normalise = draw.pick({Normalise::none, Normalise::chosen});
  router.scale = draw.pick({1.0F, 2.5F});
  return router;
}

MoverKind draw_mover(Draw& draw, const CaseLimits& limits) {
  if (limits.is_gpu) return draw.pick({MoverKind::automatic, MoverKind::peer});
  if (!limits.maps_memory) {
    return draw.pick({MoverKind::automatic, MoverKind::packed, MoverKind::peer});
  }
  return draw.pick({MoverKind::automatic, MoverKind::direct, MoverKind::packed, MoverKind::peer});
}

void draw_training(Draw& draw, SoakLayer& layer) {
  MoeLayerOptions& o = layer.options;
  if (draw.one_in(4)) layer.has_padding = true;
  if (layer.source != PickSource::given_weights && draw.one_in(3)) {
    o.losses.balance = draw.pick({BalanceLoss::none, BalanceLoss::batch});
    o.losses.scores = draw.pick({LossScores::as_routed, LossScores::shares});
    o.losses.z = draw.one_in(2);
    if (o.losses.balance != BalanceLoss::none) layer.d_losses.balance = 0.5F;
    if (o.losses.z) layer.d_losses.z = 0.25F;
  }
  if (o.weight_stage != WeightStage::input && draw.one_in(6)) {
    o.gradient_scale = GradientScale::global;
  }
  if (draw.one_in(10)) {
    o.capacity = {.factor = 1.25,
                  .rule = draw.pick({CapacityRule::first_come, CapacityRule::highest_weight})};
  }
}

SoakLayer draw_layer(Draw& draw, const CaseLimits& limits, bool is_alone) {
  SoakLayer layer;
  MoeLayerOptions& o = layer.options;
  o.hidden = draw_width(draw);
  o.intermediate = draw_width(draw);
  o.router = draw_router(draw);
  o.dtype = draw.one_in(3) ? Dtype::bf16 : Dtype::f32;
  o.activation = static_cast<Activation>(draw.below(kNumActivations));
  o.weight_stage = draw.pick({WeightStage::output, WeightStage::activation, WeightStage::input});
  o.clamp_limit = draw.pick({0.5F, 7.0F});
  if (draw.one_in(3)) {
    o.shared_intermediate = draw.between(1, 24);
    o.shared_activation = static_cast<Activation>(draw.below(kNumActivations));
  }
  o.alignment = draw.pick<std::int64_t>({1, 1, 2, 3, 8, 16, 128});
  o.mover = is_alone ? MoverKind::automatic : draw_mover(draw, limits);
  if (o.mover == MoverKind::packed && draw.one_in(4)) o.combine = CombineMode::pre_reduced;
  o.keep = draw.pick({Keep::rows, Keep::activations, Keep::nothing});
  layer.biases = draw.pick({Biases::none, Biases::all});
  layer.source = draw.pick({PickSource::router, PickSource::given_ids, PickSource::given_weights});
  layer.skew = static_cast<double>(draw.below(5)) / 4.0;
  layer.drops_ids = draw.one_in(3);
  draw_training(draw, layer);
  if (draw.one_in(2)) {
    for (int e = 0; e < o.router.num_experts; ++e) layer.owners.push_back(draw.below(1 << 20));
  }
  return layer;
}

std::int64_t most_tokens(const std::vector<SoakLayer>& layers, int num_ranks) {
  std::int64_t most = 200;
  for (const SoakLayer& layer : layers) {
    const MoeLayerOptions& o = layer.options;
    const std::int64_t work = o.hidden * (o.intermediate * o.router.top_k + o.shared_intermediate);
    most = std::min(most, std::max<std::int64_t>(2, kMostWork / work / num_ranks));
  }
  return most;
}

SoakKill draw_kill(Draw& draw, int num_ranks) {
  return {.rank = static_cast<int>(draw.below(num_ranks)),
          .collective = draw.between(1, draw.one_in(2) ? 12 : 60),
          .kind = draw.one_in(30) ? KillKind::silent : KillKind::throws};
}

std::string_view name_of(Room room) {
  switch (room) {
    case Room::exact:
      return "exact sizing";
    case Room::plenty:
      return "bounded sizing with room for all";
    case Room::replay:
      return "bounded sizing, run_step";
    case Room::refuse:
      return "bounded sizing that fails when it overflows";
    case Room::drop:
      return "bounded sizing that drops rows";
  }
  return "";
}

std::string_view name_of(MoverKind mover) {
  switch (mover) {
    case MoverKind::automatic:
      return "automatic";
    case MoverKind::direct:
      return "direct";
    case MoverKind::packed:
      return "packed";
    case MoverKind::peer:
      return "peer";
  }
  return "";
}

std::string words_for(const SoakLayer& layer, Room room) {
  const MoeLayerOptions& o = layer.options;
  std::string words = fmt::format(
      "hidden {}, inner {}, {} experts, top {}, {} {} weighted at {}, mover {}, alignment {}, "
      "keep {}",
      o.hidden, o.intermediate, o.router.num_experts, o.router.top_k, switchyard::name_of(o.dtype),
      switchyard::name_of(o.activation), switchyard::name_of(o.weight_stage), name_of(o.mover),
      o.alignment, static_cast<int>(o.keep));
  const auto add = [&](bool is_so, const std::string& text) {
    if (is_so) words += ", " + text;
  };
  add(layer.source == PickSource::given_ids, fmt::format("given ids of skew {}", layer.skew));
  add(layer.source == PickSource::given_weights,
      fmt::format("given ids of skew {} and weights", layer.skew));
  add(layer.biases == Biases::all, "biases");
  add(o.shared_intermediate > 0, fmt::format("shared expert of {}", o.shared_intermediate));
  add(o.losses.balance != BalanceLoss::none, "balance loss");
  add(o.losses.z, "z-loss");
  add(o.gradient_scale != GradientScale::off, "gradient scale");
  add(o.capacity.factor > 0, fmt::format("capacity factor {}", o.capacity.factor));
  add(o.combine == CombineMode::pre_reduced, "pre-reduced");
  add(layer.has_padding, "padding");
  add(!layer.owners.empty(), "experts placed at random");
  add(room != Room::exact, fmt::format("capacity {}", layer.capacity));
  return words;
}

}  // namespace

bool SoakLayer::has_bits_of_one_rank(Room room) const {
  return room != Room::drop && options.capacity.factor == 0.0 &&
         options.combine == CombineMode::per_assignment;
}

ExpertPlacement SoakLayer::placement(int num_ranks) const {
  if (owners.empty()) return ExpertPlacement::contiguous(options.router.num_experts, num_ranks);
  std::vector<std::int32_t> ranks;
  for (const auto owner : owners) ranks.push_back(static_cast<std::int32_t>(owner % num_ranks));
  return ExpertPlacement::from_owners(std::move(ranks), num_ranks);
}

std::vector<std::int64_t> SoakCase::tokens_of_group(int step, int group) const {
  std::vector<std::int64_t> result;
  for (int r = group; r < num_ranks; r += num_groups) {
    result.push_back(tokens[static_cast<std::size_t>(step)][static_cast<std::size_t>(r)]);
  }
  return result;
}

std::uint64_t SoakCase::seed_for(std::string_view what, int step, std::size_t layer,
                                 int group) const {
  return train::seed_of(fmt::format("{} {} {} {} {}", number, what, step, layer, group), seed);
}

std::string SoakCase::words() const {
  std::string text = fmt::format("{} rank{} with {} thread{} each", num_ranks,
                                 num_ranks == 1 ? "" : "s", threads, threads == 1 ? "" : "s");
  if (num_groups > 1) text += fmt::format(" in {} groups", num_groups);
  text += fmt::format(", {}", name_of(room));
  if (kill) {
    text +=
        fmt::format(", rank {} {} at collective {}", kill->rank,
                    kill->kind == KillKind::silent ? "falls silent" : "throws", kill->collective);
  }
  if (bad_step >= 0) text += fmt::format(", a bad id before step {}", bad_step);
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    text += fmt::format("\n  step {}: tokens by rank {}", s, fmt::join(tokens[s], " "));
  }
  for (std::size_t l = 0; l < layers.size(); ++l) {
    text += fmt::format("\n  layer {}: {}", l, words_for(layers[l], room));
  }
  return text;
}

SoakCase draw_case(std::uint64_t seed, std::int64_t number, const CaseLimits& limits) {
  Draw draw(train::seed_of(fmt::format("case {}", number), seed));
  SoakCase c{.seed = seed, .number = number};
  const auto any_ranks = static_cast<int>(draw.between(1, kMostRanks));
  c.num_ranks = limits.ranks > 0 ? limits.ranks : any_ranks;
  if (c.num_ranks > 2 && draw.one_in(6)) c.num_groups = 2;
  c.threads = static_cast<int>(draw.between(1, 3));
  c.room =
      draw.pick({Room::exact, Room::exact, Room::plenty, Room::replay, Room::refuse, Room::drop});
  for (std::int64_t l = draw.one_in(3) ? 2 : 1; l > 0; --l) {
    c.layers.push_back(draw_layer(draw, limits, c.num_ranks < 2 * c.num_groups));
  }
  const std::int64_t most = most_tokens(c.layers, c.num_ranks);
  c.tokens.resize(static_cast<std::size_t>(draw.between(1, 3)));
  for (auto& by_rank : c.tokens) {
    for (int r = 0; r < c.num_ranks; ++r) by_rank.push_back(draw_tokens(draw, most));
  }
  for (SoakLayer& layer : c.layers) {
    const auto rows = most * c.num_ranks * layer.options.router.top_k;
    const auto& alignment = layer.options.alignment;
    const auto all = rows + alignment * layer.options.router.num_experts;
    const auto some = draw.below(std::max<std::int64_t>(1, 2 * rows / c.num_ranks));
    layer.capacity = round_up(c.room == Room::plenty ? all : some, alignment);
  }
  if (c.num_ranks > 1 && c.num_groups == 1 && draw.one_in(5)) c.kill = draw_kill(draw, c.num_ranks);
  const bool gives_ids = c.layers[0].source != PickSource::router;
  if (gives_ids && c.room == Room::exact && draw.one_in(3)) {
    c.bad_step = static_cast<int>(draw.below(c.num_steps()));
  }
  return c;
}

}  // namespace switchyard::cli
