// SPDX-License-Identifier: Apache-2.0
#include "verify/golden_case.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

using nlohmann::json;

constexpr int kMostRanks = 64;  // the most that a file may ask for

[[noreturn]] void refuse(const std::string& reason) { throw InvalidArgument(reason); }

template <typename T>
T choose(const std::map<std::string, T>& choices, const std::string& key, const char* what) {
  const auto found = choices.find(key);
  if (found == choices.end()) refuse(fmt::format("its {} \"{}\" is unknown", what, key));
  return found->second;
}

// Rank 0 gets no tokens, and each further rank gets more than the one before.
std::vector<std::int64_t> uneven_offsets(std::int64_t num_tokens, int num_ranks) {
  std::vector<std::int64_t> offsets;
  const std::int64_t ranks = num_ranks;
  for (std::int64_t r = 0; r <= ranks; ++r) {
    offsets.push_back(num_tokens * r * (r - 1) / (ranks * (ranks - 1)));
  }
  return offsets;
}

std::vector<std::int64_t> even_offsets(std::int64_t num_tokens, int num_ranks) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t r = 0; r <= num_ranks; ++r) offsets.push_back(num_tokens * r / num_ranks);
  return offsets;
}

// Rejects floating-point numbers that do not fit an int, because some of them are read as integers.
json parse_settings(const std::string& text) {
  return json::parse(text, [](int /*depth*/, json::parse_event_t event, const json& value) {
    constexpr double kMost = std::numeric_limits<int>::max();
    const bool is_number = event == json::parse_event_t::value && value.is_number_float();
    if (is_number && !(std::abs(value.get<double>()) <= kMost)) {
      refuse(fmt::format("the number {} is too large", value.dump()));
    }
    return true;
  });
}

// Places experts round-robin on all ranks but the last, which gets none.
ExpertPlacement uneven_placement(int num_experts, int num_ranks) {
  std::vector<std::int32_t> owners;
  for (int e = 0; e < num_experts; ++e) owners.push_back(e % (num_ranks - 1));
  return ExpertPlacement::from_owners(std::move(owners), num_ranks);
}

}  // namespace

GoldenCase::GoldenCase(const SafetensorsFile& file)
    : file_(file), tensors_(file_.tensors()), name_(file_.path().stem().string()) {}

GoldenCase GoldenCase::read(const std::filesystem::path& path) {
  GoldenCase result(SafetensorsFile::open(path));
  const auto& metadata = result.file_.metadata();
  const auto entry = [&](const char* key) {
    const auto found = metadata.find(key);
    if (found == metadata.end()) refuse(fmt::format("its metadata has no \"{}\"", key));
    return found->second;
  };
  try {
    const auto peer = entry("peer");
    if (peer.starts_with("KempnerForge")) {
      result.read_kempner_forge(entry("case"));
    } else if (peer == "transformers") {
      result.read_hugging_face(entry("class"), entry("config"));
    } else {
      refuse(fmt::format("its peer \"{}\" is unknown", peer));
    }
    result.check_size();
  } catch (const InvalidArgument& error) {
    refuse(fmt::format("{} is not a recorded case: {}", path.string(), error.what()));
  } catch (const json::exception& error) {
    refuse(fmt::format("{} is not a recorded case: {}", path.string(), error.what()));
  }
  return result;
}

void GoldenCase::read_kempner_forge(const std::string& text) {
  using Preset = RouterOptions (*)(int, std::int64_t);
  const auto c = parse_settings(text);
  peer_ = Peer::kempner_forge;
  const auto preset = choose<Preset>({{"softmax_topk", &RouterOptions::kempner_forge_softmax},
                                      {"sigmoid_topk", &RouterOptions::kempner_forge_sigmoid}},
                                     c.at("router"), "router");
  options_.hidden = c.at("dim");
  options_.intermediate = c.at("hidden");
  options_.router = preset(c.at("experts"), c.at("top_k"));
  options_.activation = choose<Activation>(
      {{"silu", Activation::swiglu}, {"gelu", Activation::gelu}, {"relu", Activation::relu}},
      c.at("activation"), "activation");
  options_.shared_intermediate = c.at("shared").get<int>() > 0 ? options_.intermediate : 0;
  num_ranks_ = c.at("ep");
  if (num_ranks_ < 1 || num_ranks_ > kMostRanks) {
    refuse(fmt::format("ep ({}) must be 1 to {}", num_ranks_, kMostRanks));
  }
  options_.capacity.factor = c.at("capacity");
  if (c.at("gradient_scale").get<bool>()) options_.gradient_scale = GradientScale::rank;
  options_.losses = {.balance = BalanceLoss::batch, .z = true, .scope = LossScope::rank};
  if (options_.router.score == ScoreFunction::sigmoid) aux_weight_ = c.at("seq_aux");
}

void GoldenCase::read_hugging_face(const std::string& class_name, const std::string& text) {
  enum class Model { mixtral, qwen3_moe, olmoe, deepseek_v3 };
  const auto c = parse_settings(text);
  const auto model = choose<Model>({{"MixtralSparseMoeBlock", Model::mixtral},
                                    {"Qwen3MoeSparseMoeBlock", Model::qwen3_moe},
                                    {"OlmoeSparseMoeBlock", Model::olmoe},
                                    {"DeepseekV3MoE", Model::deepseek_v3}},
                                   class_name, "class");
  // Different versions have different names for the same number.
  const auto first_of = [&](std::initializer_list<const char*> keys) -> std::int64_t {
    for (const char* key : keys) {
      if (c.contains(key)) return c.at(key);
    }
    return c.at(*keys.begin());
  };
  const auto experts =
      static_cast<int>(first_of({"num_experts", "num_local_experts", "n_routed_experts"}));
  const std::int64_t top_k = c.at("num_experts_per_tok");
  peer_ = Peer::hugging_face;
  num_tokens_ = file_.tensor("x").rows();
  options_.hidden = c.at("hidden_size");
  options_.intermediate = first_of({"moe_intermediate_size", "intermediate_size"});
  auto& router = options_.router;
  if (model == Model::deepseek_v3) {
    router = RouterOptions::deepseek_v3(experts, top_k);
    router.num_expert_groups = c.at("n_group");
    router.kept_expert_groups = c.at("topk_group");
    router.scale = c.at("routed_scaling_factor");
    const std::int64_t num_shared = c.at("n_shared_experts");
    if (__builtin_mul_overflow(num_shared, options_.intermediate, &options_.shared_intermediate)) {
      refuse(fmt::format("n_shared_experts ({}) times the intermediate size ({}) is too large",
                         num_shared, options_.intermediate));
    }
  } else {
    router = RouterOptions::mixtral(experts, top_k);
  }
  if (model != Model::mixtral) {
    router.normalise = c.at("norm_topk_prob").get<bool>() ? Normalise::chosen : Normalise::none;
  }
}

// The numbers in the description are trusted if the recorded router has that many experts.
void GoldenCase::check_size() const {
  const Router router(options_.router);
  const auto gate = file_.tensor(fmt::format("weight.{}", weight_names().router));
  if (gate.rows() != options_.router.num_experts) {
    refuse(fmt::format("its router is {}, but it has {} experts", gate.shape().to_string(),
                       options_.router.num_experts));
  }
}

const WeightNames& GoldenCase::weight_names() const {
  static constexpr WeightNames kKempnerForge{.router = "router.gate.weight",
                                             .score_bias = "router.expert_bias",
                                             .gate = "gate_w",
                                             .up = "up_w",
                                             .down = "down_w",
                                             .shared = "shared_expert."};
  static constexpr WeightNames kHuggingFace{.router = "gate.weight",
                                            .score_bias = {},
                                            .gate = "experts.gate_up_proj",
                                            .up = "experts.gate_up_proj",
                                            .down = "experts.down_proj",
                                            .shared = "shared_experts."};
  return peer_ == Peer::kempner_forge ? kKempnerForge : kHuggingFace;
}

std::vector<Division> GoldenCase::divisions(int num_ranks) const {
  const int experts = options_.router.num_experts;
  const auto contiguous = ExpertPlacement::contiguous(experts, num_ranks);
  if (num_ranks_ > 0) return {{.name = "as recorded", .placement = contiguous}};
  const auto even = even_offsets(num_tokens_, num_ranks);
  if (num_ranks == 1) return {{.name = "whole", .placement = contiguous, .token_offsets = even}};
  const auto uneven = uneven_offsets(num_tokens_, num_ranks);
  return {{.name = "even", .placement = contiguous, .token_offsets = even},
          {.name = "uneven tokens", .placement = contiguous, .token_offsets = uneven},
          {.name = "uneven tokens and experts",
           .placement = uneven_placement(experts, num_ranks),
           .token_offsets = uneven}};
}

RankCase GoldenCase::rank_case(const Division& division, int rank) const {
  if (peer_ == Peer::kempner_forge) {
    const auto prefix = fmt::format("rank{}.", rank);
    const auto get = [&](const char* name) { return file_.tensor(prefix + name); };
    const auto get_if_there = [&](const char* name) {
      return file_.contains(prefix + name) ? std::optional(get(name)) : std::nullopt;
    };
    return {.x = get("x"),
            .dy = get("dy"),
            .weights = from_kempner_forge(tensors_, "weight.", division.placement, rank),
            .expert_ids = get("expert_ids"),
            .routing_weights = get("routing_weights"),
            .expert_counts = get("expert_counts"),
            .aux_loss = get("aux_loss"),
            .z_loss = get("z_loss"),
            .expert_bias_after = get_if_there("expert_bias_after"),
            .expert_ema_after = get_if_there("expert_ema_after"),
            .y = get("y"),
            .dx = get("dx"),
            .gradients = from_kempner_forge(tensors_, prefix + "d.", division.placement, rank)};
  }
  const auto at = static_cast<std::size_t>(rank);
  const auto get = [&](const char* name) {
    return file_.tensor(name).slice(division.token_offsets[at], division.token_offsets[at + 1]);
  };
  auto weights = from_hugging_face(tensors_, "weight.", division.placement, rank);
  if (options_.router.score_bias != ScoreBias::none) {
    weights.router.score_bias = file_.tensor("buffer.gate.e_score_correction_bias");
  }
  return {.x = get("x"),
          .dy = get("dy"),
          .weights = std::move(weights),
          .y = get("y"),
          .dx = get("dx"),
          .gradients = from_hugging_face(tensors_, "d.", division.placement, rank)};
}

}  // namespace switchyard::cli
