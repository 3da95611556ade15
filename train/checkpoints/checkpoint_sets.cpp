// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/checkpoint_sets.h"

#include <algorithm>

namespace switchyard::train {

std::map<std::string, TensorView> dense_tensors(const NamedSet& named) {
  std::map<std::string, TensorView> tensors;
  for (const auto& view : named.set.views()) {
    const bool is_dense = std::ranges::none_of(named.set.blocks(), [&](const MoeBlock& block) {
      return view.name.starts_with(block.name + ".");
    });
    if (is_dense) tensors.emplace(named.prefix + view.name, view.values);
  }
  return tensors;
}

std::string prefix_of(const NamedSet& named, const MoeBlock& block) {
  return named.prefix + block.name + ".";
}

void add_set(CheckpointContents& contents, const NamedSet& named) {
  for (const auto& [name, view] : dense_tensors(named)) contents.tensors.emplace(name, view);
  for (const auto& block : named.set.blocks()) {
    contents.blocks.push_back({.prefix = prefix_of(named, block),
                               .tensors = block.parameters.weights(),
                               .placement = block.placement,
                               .rank = block.rank()});
  }
}

void load_set(const Checkpoint& checkpoint, const NamedSet& named) {
  for (const auto& [name, view] : dense_tensors(named)) load_tensor(checkpoint, name, view);
  for (auto& block : named.set.blocks()) {
    load_block(checkpoint, prefix_of(named, block), block.placement, block.rank(),
               block.parameters.views());
  }
}

}  // namespace switchyard::train
