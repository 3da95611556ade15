// SPDX-License-Identifier: Apache-2.0
// Divides the MoE layers of a model over the ranks of a mesh, and sums their gradients.
#pragma once

#include <concepts>
#include <span>
#include <string>
#include <vector>

#include "switchyard/communicator.h"
#include "switchyard/device.h"
#include "switchyard/export.h"
#include "switchyard/mesh.h"
#include "switchyard/moe_parameters.h"
#include "switchyard/placement.h"

namespace switchyard {

// The weights of one MoE layer of a model, and the ranks that the experts are divided over.
struct MoeBlock {
  std::string name;              // for error messages: "layers.3.mlp"
  MoeParameters parameters;      // this rank's part
  ExpertPlacement placement;     // places all experts on the ranks of `comm`
  Communicator* comm = nullptr;  // null or of one rank: this rank holds all experts

  int rank() const { return comm == nullptr ? 0 : comm->rank(); }
};

// A model that lists its MoE layers.
template <typename Model>
concept HasMoeBlocks = requires(Model& model) {
  { model.moe_blocks() } -> std::convertible_to<std::vector<MoeBlock*>>;
};

// Divides the experts of each block evenly over the ranks of the given axes. Collective over the
// mesh's world. Axes that the mesh lacks are ignored. Each rank keeps its own experts and releases
// the memory of the others; tensors that share memory with released ones are copied, on the block's
// own device. The router and the shared expert stay whole.
//
// Returns the number of blocks divided. That is 0 if `mesh` is null, or if the axes are missing or
// have one rank; with a mesh, an undivided block gets a communicator of this rank alone. The ranks
// of one group must list the same blocks in the same order. Throws the same InvalidArgument on
// every rank, and changes nothing, if a block is already divided or the lists do not match. The
// mesh must outlive the blocks.
SWITCHYARD_API int apply_expert_parallel(std::span<MoeBlock* const> blocks, Mesh* mesh,
                                         const std::vector<std::string>& axes = {"ep"});

// Does the same for all MoE layers of a model.
template <HasMoeBlocks Model>
int apply_expert_parallel(Model& model, Mesh* mesh, const std::vector<std::string>& axes = {"ep"}) {
  const std::vector<MoeBlock*> blocks = model.moe_blocks();
  return apply_expert_parallel(std::span<MoeBlock* const>(blocks), mesh, axes);
}

// Says what the ranks along each axis of a mesh share. Names that the mesh lacks are ignored. If an
// axis is listed more than once, `pipeline` takes precedence over `experts`, and `experts` over the
// other two.
struct GradientAxes {
  std::vector<std::string> experts = {"ep"};       // as given to apply_expert_parallel
  std::vector<std::string> pipeline = {"pp"};      // ranks that hold different layers
  std::vector<std::string> tokens = {"dp", "sp"};  // copies that see different tokens
  std::vector<std::string> repeats = {"tp"};       // ranks that repeat the work on the same tokens
};

// Sums the gradients of a layer over the ranks that hold copies of its parameters, in rank order,
// without averaging. Gradients of experts are summed over the axes in `tokens`; those of the router
// and the shared expert, and the gradients given to reduce_replicated, over the axes in `tokens`
// and `experts`. Ranks along `repeats` already have equal gradients. Collective over all axes
// except `pipeline`; the first call with given axes is collective over the mesh's world, because it
// makes the groups.
//
// Throws the same InvalidArgument on all ranks of the call, and sums nothing, in these cases: an
// axis of the mesh is in none of the lists, or in both `tokens` and `repeats`; ranks give different
// axes; gradients differ in form between the ranks they are summed over; gradients share memory
// (list tied ones once); or a gradient is not in the memory of `device`. If no two ranks hold the
// same layers, calls after the first cost nothing, but ranks that give different axes are noticed
// only at the communicator's timeout.
//
// GPUs that can access each other's memory sum the gradients themselves, through a buffer of 32 MiB
// per rank. The mesh keeps this buffer and the device for each group. A call then costs the hosts a
// few small exchanges; they copy no gradients and do not wait for the GPUs. If a rank fails later,
// a later call throws CommunicationError and the sums are NaN. On CPUs, and between GPUs without
// such access, the hosts stage and sum the gradients, and wait. The order of additions, and hence
// every bit, is the same either way. Integers are always summed by the hosts.
SWITCHYARD_API void reduce_gradients(const MoeGradients& gradients, Mesh& mesh,
                                     const GradientAxes& axes = {}, const Device& device = {});
SWITCHYARD_API void reduce_replicated(std::span<const TensorView> gradients, Mesh& mesh,
                                      const GradientAxes& axes = {}, const Device& device = {});

}  // namespace switchyard
