// SPDX-License-Identifier: Apache-2.0
// Two consecutive layers, for steps over several layers.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "switchyard/moe_layer.h"

namespace switchyard::testing {

constexpr int kLayers = 2;
constexpr std::int64_t kPlenty = 4096;  // rows; more than any test needs

// This rank's two layers in the groups, with losses.
struct TwoLayers {
  TwoLayers(const LayerComms& groups, const std::array<Sizing, kLayers>& sizings,
            MoverKind mover = MoverKind::automatic);

  // Overwrites y, d_x, the losses and the gradients.
  void step(const Tensor& x);
  bool run(const Tensor& x);  // calls run_step with step(x)
  std::vector<MoeLayer*> all() const;

  ExpertPlacement placement;
  std::vector<std::unique_ptr<MoeLayer>> layers;
  std::vector<MoeWeights> weights;
  std::vector<MoeGradients> gradients;
  std::array<RouterLosses, kLayers> losses;
  Tensor y, d_x;
};

Tensor tokens_of(int rank, std::int64_t count);

}  // namespace switchyard::testing
