// Checks of a layer's options, of where its tensors lie, and of what training adds to its input.
#pragma once

#include <string_view>
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
void require_within_batch(const LayerComms& groups);
// Sequences are cut over the ranks of a group as the layer's input says.
void require_sequence(const LayerInput& in, const Communicator* group);
void require_loss_gradients(const RouterLosses& given, const LossOptions& options);

// What a tensor with one entry a token must be.
struct TokenForm {
  Shape shape;
  Dtype dtype;
  Memory memory;
};
void require_tokens(const ConstTensorView& view, const TokenForm& form, std::string_view name);

// Each of them once.
std::vector<Communicator*> distinct_groups(const LayerComms& groups);

}  // namespace switchyard
