// A step over layers of bounded sizing that is run again, exactly, when one of them overflowed.
#include <algorithm>
#include <vector>

#include "moe/check_arguments.h"
#include "moe/moe_layer_data.h"

namespace switchyard {
namespace {

using Layers = std::vector<BoundedLayer>;

bool has_overflowed(const BoundedLayer& layer) {
  return layer.sizing.is_bounded() && layer.sizing.overflow() == Overflow::fail &&
         layer.most_needed_rows > layer.sizing.capacity();
}

// Room for the rows that were needed, and an eighth more: the next step is seldom the same.
std::int64_t grown(std::int64_t needed_rows, std::int64_t alignment) {
  const auto wanted = needed_rows + needed_rows / 8;
  return (wanted + alignment - 1) / alignment * alignment;
}

void run_once(const Layers& layers, const std::function<void()>& step) {
  for (const auto& layer : layers) {
    layer.most_needed_rows = 0;
    layer.first_problem.clear();
  }
  step();
}

// Collective, since ranks of other groups of experts saw other rows.
bool any_overflow(const Layers& layers) {
  Tensor verdict =
      Tensor::from<std::int32_t>({1}, {std::ranges::any_of(layers, has_overflowed) ? 1 : 0});
  layers.front().batch.all_reduce(verdict, ReduceOp::max);
  return verdict.span<std::int32_t>()[0] != 0;
}

// Collective.
void require_no_problem(const Layers& layers) {
  std::string problem;
  for (const auto& layer : layers) {
    if (problem.empty()) problem = layer.first_problem;
  }
  const auto first = first_objection(layers.front().batch, "run_step", problem);
  require(first.empty(), "{}", first);
}

void run_exactly(const Layers& layers, const std::function<void()>& step) {
  std::vector<Sizing> bounded;
  for (const auto& layer : layers) {
    bounded.push_back(layer.sizing);
    layer.resize(Sizing::exact());
  }
  const auto restore = [&] {
    for (std::size_t i = 0; i < layers.size(); ++i) layers[i].resize(bounded[i]);
  };
  try {
    run_once(layers, step);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

// Collective: groups of experts that had enough grow along, so that all keep one capacity.
void grow(const Layers& layers) {
  Tensor needed({static_cast<std::int64_t>(layers.size())}, Dtype::i64);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    needed.span<std::int64_t>()[i] = layers[i].most_needed_rows;
  }
  layers.front().batch.all_reduce(needed, ReduceOp::max);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].most_needed_rows = needed.span<std::int64_t>()[i];
    if (!has_overflowed(layers[i])) continue;
    layers[i].resize(Sizing::bounded(grown(layers[i].most_needed_rows, layers[i].alignment),
                                     layers[i].sizing.overflow()));
  }
}

}  // namespace

void BoundedLayer::resize(const Sizing& new_sizing) const {
  dispatcher.resize(new_sizing);
  sizing = new_sizing;
}

bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step) {
  Layers all;
  std::vector<RouterStatistics> statistics_before;
  for (MoeLayer* layer : layers) {
    all.push_back(layer->data_->bounded());
    statistics_before.push_back(layer->statistics());
  }
  if (all.empty()) {
    step();
    return false;
  }
  const auto forget_statistics = [&] {
    for (std::size_t i = 0; i < all.size(); ++i) all[i].statistics = statistics_before[i];
  };
  try {
    run_once(all, step);
    if (!any_overflow(all)) {
      require_no_problem(all);
      return false;
    }
    forget_statistics();
    run_exactly(all, step);
  } catch (...) {
    forget_statistics();
    throw;
  }
  grow(all);
  return true;
}

}  // namespace switchyard
