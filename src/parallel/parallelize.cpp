// SPDX-License-Identifier: Apache-2.0
// Divides blocks over ranks. Everything is checked on all ranks before any rank changes anything.
#include "switchyard/parallelize.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <set>

#include "comm/agreement.h"
#include "core/given.h"
#include "core/require.h"
#include "device/new_tensor.h"
#include "moe/expert_form.h"
#include "moe/expert_tensors.h"
#include "parallel/mesh_axes.h"

namespace switchyard {
namespace {

constexpr std::string_view kParallelize = "apply_expert_parallel";

void require_form(const MoeBlock& block) {
  try {
    (void)form_of(block.parameters.weights().experts);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", block.name, error.what()));
  }
}

void require_whole(const MoeBlock& block) {
  const int num_ranks = block.comm == nullptr ? 1 : block.comm->size();
  require(num_ranks == 1, "{} is already divided over {} ranks", block.name, num_ranks);
  const auto num_held = block.parameters.weights().experts.size();
  const auto num_experts = block.placement.num_experts();
  require(num_experts > 0, "the placement of {} has no experts", block.name);
  require(num_held == static_cast<std::size_t>(num_experts),
          "{} holds {} of {} experts: only a rank that holds all of them can divide them",
          block.name, num_held, num_experts);
  require_form(block);
}

void require_whole(std::span<MoeBlock* const> blocks) {
  std::set<const MoeBlock*> seen;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    require(blocks[i] != nullptr, "block {} of {} is null", i, blocks.size());
    require(seen.insert(blocks[i]).second, "{} is listed twice", blocks[i]->name);
    require_whole(*blocks[i]);
  }
}

void require_same_axes(Communicator& world, const std::vector<std::string>& axes) {
  Agreement agreement(world, kParallelize);
  agreement.add(list_of("axes to divide over", "axis to divide over, number", axes));
  agreement.gather();
  agreement.require_equal();
}

// Returns a text such as "layers.3.mlp, 8 experts: up f32 [6,8], down f32 [8,6]".
std::string text_of(const MoeBlock& block) {
  std::vector<std::string> parts;
  const auto tensors = tensors_of(block.parameters.weights().experts.front());
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (!is_given(tensors[t])) continue;
    parts.push_back(fmt::format("{} {}", kExpertTensors[t], form_text(tensors[t])));
  }
  return fmt::format("{}, {} experts: {}", block.name, block.placement.num_experts(),
                     fmt::join(parts, ", "));
}

// Collective over the group, whose ranks must divide the same layers.
void require_same_blocks(Communicator& ep_group, int world_rank,
                         std::span<MoeBlock* const> blocks) {
  std::vector<std::string> texts;
  for (const auto* block : blocks) texts.push_back(text_of(*block));
  Agreement agreement(ep_group, kParallelize);
  agreement.add(list_of("layers", "layer", texts));
  agreement.gather(world_rank);
  agreement.require_equal();
}

// Owners of memory, compared by what they own, not by where they point.
using Owners = std::set<std::shared_ptr<std::byte>, std::owner_less<>>;

std::vector<ExpertViews> packed_anew(const MoeViews& part, const Device& device) {
  const auto experts = MoeParameters::of(part, device).weights().experts;
  const ExpertForm form = form_of(experts);
  std::vector<std::size_t> order(experts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<Tensor> packed;
  for (const auto& rows : packed_rows(form, experts)) packed.push_back(pack(rows, order, device));
  return unpack(form, packed);
}

void copy_if_owned_by(const Owners& owners, TensorView& view, const Device& device) {
  if (!owners.contains(view.owner())) return;
  Tensor copy = new_tensor(device, view.shape(), view.dtype());
  device.copy(view, copy);
  view = copy;
}

// Returns the part that this rank keeps. Tensors that share memory with released experts are
// copied, so that the memory can be freed.
MoeViews part_of(MoeViews whole, std::span<const std::int32_t> kept, const Device& device) {
  MoeViews part{.router = whole.router, .shared = whole.shared};
  Owners going;
  for (std::size_t e = 0; e < whole.experts.size(); ++e) {
    if (std::ranges::binary_search(kept, static_cast<std::int32_t>(e))) {
      part.experts.push_back(whole.experts[e]);
      continue;
    }
    for (const auto& view : tensors_of(whole.experts[e])) {
      if (view.owner() != nullptr) going.insert(view.owner());
    }
  }
  bool shared = false;
  for (const auto& expert : part.experts) {
    for (const auto& view : tensors_of(expert)) shared |= going.contains(view.owner());
  }
  if (shared) part.experts = packed_anew(part, device);
  for (auto* view : {&part.router.gate, &part.router.gate_bias, &part.router.score_bias}) {
    copy_if_owned_by(going, *view, device);
  }
  for (auto* view : tensors_in(part.shared)) copy_if_owned_by(going, *view, device);
  return part;
}

void divide(MoeBlock& block, Communicator& ep_group) {
  block.placement = ExpertPlacement::contiguous(block.placement.num_experts(), ep_group.size());
  block.comm = &ep_group;
  const Device device = block.parameters.device();
  const auto kept = block.placement.experts_of(ep_group.rank());
  block.parameters = MoeParameters::of(part_of(block.parameters.views(), kept, device), device);
}

}  // namespace

int apply_expert_parallel(std::span<MoeBlock* const> blocks, Mesh* mesh,
                          const std::vector<std::string>& axes) {
  if (mesh == nullptr) return 0;
  Communicator& world = mesh->world();
  agree(world, kParallelize, [&] { require_whole(blocks); });
  const auto inside = axes_where(*mesh, [&](const auto& name) { return is_among(axes, name); });
  require_same_axes(world, inside);
  Communicator& ep_group = mesh->comm(inside);
  agree(world, [&] { require_same_blocks(ep_group, world.rank(), blocks); });
  for (MoeBlock* block : blocks) {
    if (ep_group.size() > 1) {
      divide(*block, ep_group);
    } else if (block->comm == nullptr) {
      block->comm = &ep_group;  // a group of one rank: layers are made over it as usual
    }
  }
  return ep_group.size() > 1 ? static_cast<int>(blocks.size()) : 0;
}

}  // namespace switchyard
