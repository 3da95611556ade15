// Divides the MoE layers of a model over the ranks of a mesh, and adds up their gradients.
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

// The weights of one MoE layer of a model, and the ranks that they are divided over.
struct MoeBlock {
  std::string name;              // for messages: "layers.3.mlp"
  MoeParameters parameters;      // this rank's part
  ExpertPlacement placement;     // of all experts over the ranks of `comm`
  Communicator* comm = nullptr;  // null, or of one rank: this rank holds them all

  int rank() const { return comm == nullptr ? 0 : comm->rank(); }
};

// Anything that lists its MoE layers.
template <typename Model>
concept HasMoeBlocks = requires(Model& model) {
  { model.moe_blocks() } -> std::convertible_to<std::vector<MoeBlock*>>;
};

// Collective over the mesh's world. Divides experts evenly over the group of those of these axes
// that the mesh has: each rank keeps its own, and the memory of the others is given back; what
// shared memory with them is copied. The router and the shared expert stay whole. Returns how many
// layers it divided: none without a mesh, without the axes, or where they have one rank; with a
// mesh, such layers get the group of this rank alone. Ranks of one group list the same layers in
// the same order. A layer that is divided already is an InvalidArgument, the same on every rank,
// that names it, and then nothing is changed. The mesh must outlive the blocks. Layers stay on
// their devices, which copy what is copied.
SWITCHYARD_API int apply_expert_parallel(std::span<MoeBlock* const> blocks, Mesh* mesh,
                                         const std::vector<std::string>& axes = {"ep"});

template <HasMoeBlocks Model>
int apply_expert_parallel(Model& model, Mesh* mesh, const std::vector<std::string>& axes = {"ep"}) {
  const std::vector<MoeBlock*> blocks = model.moe_blocks();
  return apply_expert_parallel(std::span<MoeBlock* const>(blocks), mesh, axes);
}

// Says what the ranks along each axis of a mesh share. Axes that the mesh does not have are left
// out. `pipeline` counts before `experts`, and `experts` before the other two.
struct GradientAxes {
  std::vector<std::string> experts = {"ep"};       // as given to apply_expert_parallel
  std::vector<std::string> pipeline = {"pp"};      // ranks that hold other layers
  std::vector<std::string> tokens = {"dp", "sp"};  // ranks that hold copies, and other tokens
  std::vector<std::string> repeats = {"tp"};       // ranks that do the same with the same tokens
};

// Adds gradients up in rank order, never averaging: those of the experts over the axes of `tokens`;
// those of the router and the shared expert, and replicated ones of the rest of a model, over those
// of `experts`, too. Ranks along `repeats` have the same gradients already. Collective over all
// axes but `pipeline`; the first call with these axes over the mesh's world, which makes the
// groups. An axis of the mesh that is in none of the lists, or in both `tokens` and `repeats`,
// gradients that are not alike on the ranks they are added over, other axes on some ranks, and
// gradients that share memory (tied ones are listed once) are the same InvalidArgument on all ranks
// of the call, and nothing is added. Where no rank has copies, calls after the first cost nothing,
// and other axes than before on some ranks only are not noticed before the communicator's timeout.
//
// Gradients are in the memory of `device`; others are such an InvalidArgument, too. GPUs that reach
// each other's memory add them up themselves, through a buffer of 32 MiB a rank that the mesh keeps
// for each group, and the device with it: a call costs a few small exchanges of the hosts, which
// copy nothing and do not wait for the GPUs. A rank that fails later is a CommunicationError of a
// later call, and the sums are NaN. Elsewhere the hosts wait, and add what they stage. The order of
// additions, and so every bit, is the same; whole numbers are always added by the hosts.
SWITCHYARD_API void reduce_gradients(const MoeGradients& gradients, Mesh& mesh,
                                     const GradientAxes& axes = {}, const Device& device = {});
SWITCHYARD_API void reduce_replicated(std::span<const TensorView> gradients, Mesh& mesh,
                                      const GradientAxes& axes = {}, const Device& device = {});

}  // namespace switchyard
