// What Router::route does once its arguments are checked.
#pragma once

#include "device/router_sums.h"
#include "switchyard/device.h"
#include "switchyard/router.h"

namespace switchyard {

// Sums may be null; otherwise they are added to.
Routing route(const Device& device, const RouterOptions& options, const RouterWeights& weights,
              const RouterInput& in, const RouterSums* sums);

}  // namespace switchyard
