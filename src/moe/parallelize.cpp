// Divides blocks: everything is checked on all ranks before anything is changed on one.
#include "switchyard/parallelize.h"

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <set>

#include "core/hash.h"
#include "core/require.h"
#include "moe/check_arguments.h"
#include "moe/expert_form.h"
#include "moe/mesh_axes.h"
#include "moe/plan_record.h"

namespace switchyard {
namespace {

constexpr std::string_view kOperation = "apply_expert_parallel";

void require_form(const MoeBlock& block) {
  try {
    (void)form_of(block.parameters.weights().experts);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", block.name, error.what()));
  }
}

void require_whole(const MoeBlock& block) {
  const int num_ranks = block.group == nullptr ? 1 : block.group->size();
  require(num_ranks == 1, "{} is divided over {} ranks already", block.name, num_ranks);
  const auto num_held = block.parameters.views().experts.size();
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
  const auto joined = fmt::format("{}", fmt::join(axes, ", "));
  const std::array<Field, 1> fields{
      {{"the axes to divide over (their hash)", hash_of(std::span<const char>(joined))}}};
  require_equal_fields(fields, gather_fields(world, fields));
}

// Collective over the group, whose ranks divide the same layers between them.
void require_same_blocks(Communicator& group, std::span<MoeBlock* const> blocks) {
  const std::array<Field, 1> number{
      {{"the number of layers", static_cast<std::int64_t>(blocks.size())}}};
  require_equal_fields(number, gather_fields(group, number));
  std::vector<std::string> names;
  for (const auto* block : blocks) names.push_back("num_experts of " + block->name);
  std::vector<Field> fields;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    fields.push_back({names[i], blocks[i]->placement.num_experts()});
  }
  require_equal_fields(fields, gather_fields(group, fields));
}

// Owners of memory, however they point to it.
using Owners = std::set<std::shared_ptr<std::byte>, std::owner_less<>>;

template <typename Fn>
void for_each_tensor(ExpertGradients& e, Fn fn) {
  for (auto* view : {&e.gate, &e.up, &e.down, &e.gate_bias, &e.up_bias, &e.down_bias}) fn(*view);
}

std::vector<ExpertGradients> packed_anew(const MoeGradients& part) {
  const auto experts = MoeParameters::of(part).weights().experts;
  const ExpertForm form = form_of(experts);
  std::vector<std::size_t> order(experts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<Tensor> packed;
  for (const auto& rows : packed_rows(form, experts)) packed.push_back(pack(rows, order));
  return unpack(form, packed);
}

void copy_if_owned_by(const Owners& owners, TensorView& view) {
  if (!owners.contains(view.owner())) return;
  Tensor copy(view.shape(), view.dtype());
  copy_rows(copy.data(), view);
  view = copy;
}

// What is kept must not keep the memory of what goes: where they share it, it is copied.
MoeGradients part_of(MoeGradients whole, std::span<const std::int32_t> kept) {
  MoeGradients part{.router = whole.router, .shared = whole.shared};
  Owners going;
  for (std::size_t e = 0; e < whole.experts.size(); ++e) {
    if (std::ranges::binary_search(kept, static_cast<std::int32_t>(e))) {
      part.experts.push_back(whole.experts[e]);
      continue;
    }
    for_each_tensor(whole.experts[e], [&](const TensorView& view) {
      if (view.owner() != nullptr) going.insert(view.owner());
    });
  }
  bool shared = false;
  for (auto& expert : part.experts) {
    for_each_tensor(expert, [&](const TensorView& v) { shared |= going.contains(v.owner()); });
  }
  if (shared) part.experts = packed_anew(part);
  const auto copy = [&](TensorView& view) { copy_if_owned_by(going, view); };
  for (auto* view : {&part.router.gate, &part.router.gate_bias, &part.router.score_bias}) {
    copy(*view);
  }
  for_each_tensor(part.shared, copy);
  return part;
}

void divide(MoeBlock& block, Communicator& group) {
  block.placement = ExpertPlacement::contiguous(block.placement.num_experts(), group.size());
  block.group = &group;
  block.parameters = MoeParameters::of(
      part_of(block.parameters.views(), block.placement.experts_of(group.rank())));
}

}  // namespace

int apply_expert_parallel(std::span<MoeBlock* const> blocks, Mesh* mesh,
                          const std::vector<std::string>& axes) {
  if (mesh == nullptr) return 0;
  Communicator& world = mesh->world();
  check_together(kOperation, world, [&] { require_whole(blocks); });
  const auto inside = axes_where(*mesh, [&](const auto& name) { return is_among(axes, name); });
  require_same_axes(world, inside);
  Communicator& group = mesh->group(inside);
  check_together(kOperation, world, [&] { require_same_blocks(group, blocks); });
  for (MoeBlock* block : blocks) {
    if (group.size() > 1) {
      divide(*block, group);
    } else if (block->group == nullptr) {
      block->group = &group;  // of this rank alone: a layer is made over it like any other
    }
  }
  return group.size() > 1 ? static_cast<int>(blocks.size()) : 0;
}

}  // namespace switchyard
