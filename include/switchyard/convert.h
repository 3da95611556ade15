// SPDX-License-Identifier: Apache-2.0
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

// Both functions look for prefix + name, such as "model.layers.3.mlp." + "gate.weight". They return
// the router, the shared expert if there is one, and the experts that `rank` owns. Packed tensors
// hold all E experts, or exactly the rank's own in ascending order of id; names of single experts
// use global ids. Gradients under the same names convert in the same way.
//
// Tensors stored (out, in) are returned as views. Others are transposed copies, of the rank's
// experts only; f16 is copied as f32. A tensor to be copied must be in the memory of `device`, and
// so is the copy. The host transposes and widens a GPU's tensors, one matrix at a time, and waits
// for the GPU.
//
// Throws InvalidArgument, naming the tensor, its extents and the expected ones; if a tensor is
// missing, the names that were tried; or a tensor of a shared expert that has no up_proj. Throws
// Unsupported, naming a tensor that exists but cannot be read, and its dtype.

// Finds a block in the form of Hugging Face Transformers, which is also that of save_checkpoint.
// "(optional)" marks tensors that may be missing:
//   gate.weight [E, H]; gate.bias [E] and gate.e_score_correction_bias [E] (both optional)
//   experts.gate_up_proj [e, 2I, H] (gates first), or experts.up_proj [e, I, H] without gates, and
//   experts.down_proj [e, H, I]; biases [e, 2I], [e, I] and [e, H] under the same names with the
//   suffix _bias (optional); or
//   experts.{id}.{gate,up,down}_proj.weight, or Mixtral's experts.{id}.{w1,w3,w2}.weight, without
//   gates if no gate is stored; each .bias beside its .weight (optional)
//   shared_experts.{gate,up,down}_proj.weight and .bias, or shared_expert.…, in the same way
//   (optional); a shared expert with its own gate (shared_expert_gate.weight of Qwen2-MoE) is
//   Unsupported
// or in the form of gpt-oss, recognised by router.weight, whose experts are copied:
//   router.weight [E, H], router.bias [E]
//   experts.gate_up_proj [e, H, 2I] and experts.gate_up_proj_bias [e, 2I], gates and ups
//   interleaved
//   experts.down_proj [e, I, H] and experts.down_proj_bias [e, H]
SWITCHYARD_API MoeWeights from_hugging_face(const NamedTensors& tensors, std::string_view prefix,
                                            const ExpertPlacement& placement, int rank,
                                            const Device& device = {});

// Finds a block in the form of KempnerForge. The experts and the shared expert may have a gate or
// not:
//   router.gate.weight [E, H]; router.expert_bias [E] (optional)
//   up_w, gate_w [e, H, I] and down_w [e, I, H], which are copied, or
//   experts.{id}.{gate,up,down}_proj.weight, each with a .bias (optional)
//   shared_expert.{gate,up,down}_proj.weight, or shared_experts.…, in the same way (optional)
SWITCHYARD_API MoeWeights from_kempner_forge(const NamedTensors& tensors, std::string_view prefix,
                                             const ExpertPlacement& placement, int rank,
                                             const Device& device = {});

}  // namespace switchyard
