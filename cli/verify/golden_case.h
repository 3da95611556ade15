// SPDX-License-Identifier: Apache-2.0
// Cases recorded by other systems: inputs, weights, results and gradients of one MoE layer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/convert.h"
#include "switchyard/moe_layer.h"
#include "switchyard/placement.h"
#include "switchyard/safetensors.h"

namespace switchyard::cli {

enum class Peer { kempner_forge, hugging_face };

// The recorded names of the weights; with the prefix "d." those of their gradients.
struct WeightNames {
  std::string_view router;
  std::string_view score_bias;  // if it has a gradient
  std::string_view gate;  // gate of the experts; the same as `up` if both are packed in one tensor
  std::string_view up;
  std::string_view down;
  std::string_view shared;  // prefix of the shared expert's names
};

// How a case is divided over ranks.
struct Division {
  std::string name;
  ExpertPlacement placement;
  // [ranks + 1]: the tokens of each rank, for a case that was not recorded by rank.
  std::vector<std::int64_t> token_offsets = {};
};

// The inputs of one rank, and the results that were recorded for it.
struct RankCase {
  ConstTensorView x;   // [T, H]
  ConstTensorView dy;  // [T, H]
  MoeWeights weights;
  std::optional<ConstTensorView> expert_ids = {};         // [T, K] i64
  std::optional<ConstTensorView> routing_weights = {};    // [T, K]
  std::optional<ConstTensorView> expert_counts = {};      // [E]
  std::optional<ConstTensorView> aux_loss = {};           // [1]
  std::optional<ConstTensorView> z_loss = {};             // [1]
  std::optional<ConstTensorView> expert_bias_after = {};  // [E]
  std::optional<ConstTensorView> expert_ema_after = {};   // [E]
  ConstTensorView y;                                      // [T, H]
  ConstTensorView dx;                                     // [T, H]
  MoeWeights gradients;
};

class GoldenCase {
 public:
  // Throws InvalidArgument if the file is not a recorded case.
  static GoldenCase read(const std::filesystem::path& path);

  const std::string& name() const { return name_; }
  Peer peer() const { return peer_; }
  const MoeLayerOptions& options() const { return options_; }
  const WeightNames& weight_names() const;
  // The number of ranks it was recorded with; 0: the result is the same for any number.
  int num_ranks() const { return num_ranks_; }
  // The factor of the balance loss in the recorded aux_loss.
  float aux_weight() const { return aux_weight_; }

  std::vector<Division> divisions(int num_ranks) const;
  RankCase rank_case(const Division& division, int rank) const;

 private:
  explicit GoldenCase(const SafetensorsFile& file);
  void read_kempner_forge(const std::string& text);
  void read_hugging_face(const std::string& class_name, const std::string& text);
  void check_size() const;

  SafetensorsFile file_;
  NamedTensors tensors_;
  std::string name_;
  Peer peer_ = Peer::kempner_forge;
  MoeLayerOptions options_;
  int num_ranks_ = 0;
  std::int64_t num_tokens_ = 0;  // over all ranks, for a case that was not recorded by rank
  float aux_weight_ = 1.0F;
};

}  // namespace switchyard::cli
