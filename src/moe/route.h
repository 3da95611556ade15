// What Router::route does once its arguments are checked, and what a layer does in its place.
#pragma once

#include "device/router_sums.h"
#include "switchyard/device.h"
#include "switchyard/router.h"

namespace switchyard {

// Sums may be null; otherwise they are added to.
Routing route(const Device& device, const RouterOptions& options, const RouterWeights& weights,
              const RouterInput& in, const RouterSums* sums);
// The choice of in.expert_ids with these weights [T, K] f32: no gate takes part.
Routing given_routing(const Device& device, const RouterOptions& options, const RouterInput& in,
                      const ConstTensorView& weights, const RouterSums* sums);

}  // namespace switchyard
