// Finds a rank's part of an MoE block among the named tensors of a checkpoint.
#pragma once

#include <string>
#include <string_view>

#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"
#include "switchyard/safetensors.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Both look for prefix + name, such as "model.layers.3.mlp." + "gate.weight", and give the router,
// the shared expert where there is one, and the experts that `rank` owns. Packed tensors hold all E
// experts, or exactly the rank's own in ascending order of id; names of single experts have global
// ids. What lies (out, in) is viewed where it lies, and what does not is copied, for the rank's
// experts only; so is f16, as f32. Gradients under the same names convert in the same way. What is
// copied is in the memory of `device`, before and after; a GPU's is transposed or widened by the
// host, a matrix at a time, which waits.
//
// InvalidArgument names the tensor, its extents and what they must be, or, where a tensor is
// missing, the names that were looked for; or a tensor of a shared expert that has no up_proj.
// Unsupported names a tensor that is there but cannot be read, and its dtype.

// Of Hugging Face Transformers, and of save_checkpoint:
//   gate.weight [E, H]; gate.bias [E] and gate.e_score_correction_bias [E], if there
//   experts.gate_up_proj [e, 2I, H] (gates first), or experts.up_proj [e, I, H] without gates, and
//   experts.down_proj [e, H, I]; their biases [e, 2I], [e, I] and [e, H], named as they are with
//   _bias behind, if there; or
//   experts.{id}.{gate,up,down}_proj.weight, or Mixtral's experts.{id}.{w1,w3,w2}.weight, without
//   gates if there are none; their .bias beside their .weight, if there
//   shared_experts.{gate,up,down}_proj.weight and .bias, likewise, or shared_expert.…; one that has
//   a gate of its own (shared_expert_gate.weight of Qwen2-MoE) is Unsupported
// and of gpt-oss, known by its router.weight, whose experts are copied:
//   router.weight [E, H], router.bias [E]
//   experts.gate_up_proj [e, H, 2I] and experts.gate_up_proj_bias [e, 2I], gates and ups in turns
//   experts.down_proj [e, I, H] and experts.down_proj_bias [e, H]
SWITCHYARD_API MoeWeights from_hugging_face(const NamedTensors& tensors, std::string_view prefix,
                                            const ExpertPlacement& placement, int rank,
                                            const Device& device = {});

// Of KempnerForge; experts and shared expert have a gate or none:
//   router.gate.weight [E, H]; router.expert_bias [E], if there
//   up_w, gate_w [e, H, I] and down_w [e, I, H], which are copied, or
//   experts.{id}.{gate,up,down}_proj.weight, and .bias if there
//   shared_expert.{gate,up,down}_proj.weight, or shared_experts.…, likewise
SWITCHYARD_API MoeWeights from_kempner_forge(const NamedTensors& tensors, std::string_view prefix,
                                             const ExpertPlacement& placement, int rank,
                                             const Device& device = {});

}  // namespace switchyard
