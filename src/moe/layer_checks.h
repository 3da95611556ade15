// Checks of a layer's options and of what training adds to its input.
#pragma once

#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"
#include "switchyard/placement.h"

namespace switchyard {

void require_valid(const MoeLayerOptions& o, const ExpertPlacement& placement);
// Collective.
void require_same_options(Communicator& comm, const MoeLayerOptions& o,
                          const ExpertPlacement& placement);
// Collective over all of them: what is summed over the batch is summed over all their ranks.
void require_within_batch(const LayerGroups& groups);
// Sequences are cut over the ranks of a group as the layer's input says.
void require_sequence(const LayerInput& in, const Communicator* group);
void require_loss_gradients(const RouterLosses& given, const LossOptions& options);

// Each of them once.
std::vector<Communicator*> distinct_groups(const LayerGroups& groups);

}  // namespace switchyard
