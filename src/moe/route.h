// SPDX-License-Identifier: Apache-2.0
// Routing for callers that have checked the arguments: Router::route and MoeLayer.
#pragma once

#include "device/router_sums.h"
#include "switchyard/device.h"
#include "switchyard/router.h"

namespace switchyard {

// Routes the tokens, and adds to `sums` unless it is null.
Routing route(const Device& device, const RouterOptions& options, const RouterWeights& weights,
              const RouterInput& in, const RouterSums* sums);
// Routes by in.expert_ids with the given weights, [T, K] f32, without a gate.
Routing given_routing(const Device& device, const RouterOptions& options, const RouterInput& in,
                      const ConstTensorView& weights, const RouterSums* sums);

}  // namespace switchyard
