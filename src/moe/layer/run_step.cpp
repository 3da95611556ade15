// SPDX-License-Identifier: Apache-2.0
// Runs a step over layers with bounded sizing, and runs it again with exact sizing if one
// overflowed.
#include <algorithm>
#include <exception>
#include <limits>
#include <set>
#include <vector>

#include "comm/agreement.h"
#include "comm/sum_integers.h"
#include "core/require.h"
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_record.h"

namespace switchyard {
namespace {

constexpr std::string_view kRunStep = "run_step";

using Layers = std::vector<MoeLayerData*>;

bool has_overflowed(const MoeLayerData* layer) {
  const Sizing& sizing = layer->options.sizing;
  return sizing.is_bounded() && sizing.overflow() == Overflow::fail &&
         (layer->most_needed_rows > sizing.capacity() ||
          layer->most_needed_tokens > sizing.token_capacity());
}

// Returns room for the needed rows and an eighth more, since the next step may need more.
std::int64_t grown(std::int64_t needed_rows, std::int64_t alignment) {
  constexpr auto kMost = std::int64_t{std::numeric_limits<std::int32_t>::max()};
  const auto wanted = std::min(needed_rows + needed_rows / 8 + alignment - 1, kMost);
  return wanted / alignment * alignment;
}

std::vector<Communicator*> comms_of(const Layers& layers) {
  std::set<Communicator*> comms;
  for (const auto* layer : layers) comms.insert(layer->comms.begin(), layer->comms.end());
  return {comms.begin(), comms.end()};
}

// Returns the first problem on this rank, which the other ranks of its experts' group know too;
// empty if there is none.
std::string problem_of(const Layers& layers) {
  for (const auto* layer : layers) {
    if (layer->first_problem.empty()) continue;
    const bool is_alone = &layer->batch == &layer->comm;
    return is_alone ? layer->first_problem : "in its group of experts, " + layer->first_problem;
  }
  return {};
}

// True if a layer has noted this error. An exact layer throws what a bounded one only notes, and
// all ranks of its group throw it.
bool is_shared(const Layers& layers, const InvalidArgument& error) {
  return std::ranges::any_of(
      layers, [&](const auto* layer) { return layer->first_problem == error.what(); });
}

// Runs the step. If this rank alone fails, aborts the communicators so that no rank waits for it.
// Returns an error that the ranks of a group share, or null.
std::exception_ptr run(const Layers& layers, const std::function<void()>& step) {
  return or_abort(comms_of(layers), kRunStep, [&]() -> std::exception_ptr {
    try {
      step();
    } catch (const InvalidArgument& error) {
      if (!is_shared(layers, error)) throw;
      return std::current_exception();
    }
    return nullptr;
  });
}

// Collective. An error that the ranks of one experts' group share becomes the error of all ranks.
void run_once(const Layers& layers, const std::function<void()>& step) {
  for (auto* layer : layers) layer->forget_step();
  const auto shared = run(layers, step);
  or_abort(comms_of(layers), kRunStep, [&] {
    for (auto* layer : layers) layer->learn_of_step();
  });
  const auto problem = problem_of(layers);
  try {
    agree(layers.front()->batch, kRunStep, [&] { require(problem.empty(), "{}", problem); });
  } catch (const CommunicationError&) {  // the error may have aborted the batch already
    if (shared) std::rethrow_exception(shared);
    throw;
  }
}

// True if a layer overflowed on any rank. Collective, since the ranks of other experts' groups
// received other rows.
bool any_overflow(const Layers& layers) {
  std::int64_t overflows = std::ranges::count_if(layers, has_overflowed);
  sum_integers(layers.front()->batch, {{&overflows, 1}});
  return overflows > 0;
}

void run_exactly(const Layers& layers, const std::function<void()>& step) {
  std::vector<Sizing> bounded;
  for (auto* layer : layers) {
    bounded.push_back(layer->options.sizing);
    layer->resize(Sizing::exact());
  }
  const auto restore = [&] {
    for (std::size_t i = 0; i < layers.size(); ++i) layers[i]->resize(bounded[i]);
  };
  try {
    run_once(layers, step);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

// Returns a sizing that is never smaller than before. The token capacity follows the row capacity
// unless it was set separately.
Sizing grown(const Sizing& sizing, std::int64_t needed_rows, std::int64_t needed_tokens,
             std::int64_t alignment) {
  const auto capacity = std::max(sizing.capacity(), grown(needed_rows, alignment));
  const bool bounds_tokens = sizing.token_capacity() != sizing.capacity();
  const auto tokens = std::max(sizing.token_capacity(), grown(needed_tokens, 1));
  return Sizing::bounded(capacity, sizing.overflow(), bounds_tokens ? tokens : 0);
}

// Collective. Experts' groups that had enough room grow too, so that all keep the same capacity.
void grow(const Layers& layers) {
  Tensor needed({static_cast<std::int64_t>(layers.size()), 2}, Dtype::i64);
  const auto numbers = needed.span<std::int64_t>();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    numbers[2 * i] = layers[i]->most_needed_rows;
    numbers[2 * i + 1] = layers[i]->most_needed_tokens;
  }
  layers.front()->batch.all_reduce(needed, ReduceOp::max);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    MoeLayerData& layer = *layers[i];
    layer.most_needed_rows = numbers[2 * i];
    layer.most_needed_tokens = numbers[2 * i + 1];
    if (!has_overflowed(&layer)) continue;
    layer.resize(grown(layer.options.sizing, layer.most_needed_rows, layer.most_needed_tokens,
                       layer.options.alignment));
  }
}

}  // namespace

void MoeLayerData::resize(const Sizing& sizing) {
  planner.resize(sizing);
  options.sizing = sizing;
}

void MoeLayerData::forget_step() {
  most_needed_rows = 0;
  most_needed_tokens = 0;
  first_problem.clear();
  if (step_words) backend_of(device).set_zero(*step_words);
}

void MoeLayerData::learn_of_step() {
  if (!step_words) return;
  const Tensor fetched = device.to_host(*step_words);
  check_ranks();
  const auto words = fetched.span<std::int64_t>();
  most_needed_rows = words[kStepMostNeeded];
  most_needed_tokens = words[kStepMostTokens];
  if (!first_problem.empty() || words[kStepHasProblem] == 0) return;
  PlanRecords records;
  records.headers.resize(static_cast<std::size_t>(words[kStepProblemRank]) + 1);
  add_problems(records.headers.back(), fetched.view().slice(kStepProblem, kStepWords));
  first_problem = describe_non_finite(records);
  if (first_problem.empty()) first_problem = describe_bad_ids(records, options.router.num_experts);
}

bool run_step(std::span<MoeLayer* const> layers, const std::function<void()>& step) {
  require(step != nullptr, "{}: step is empty: pass a function", kRunStep);
  Layers all;
  std::set<const MoeLayer*> seen;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    require(layers[i] != nullptr, "{}: layer {} of {} is null", kRunStep, i, layers.size());
    if (!seen.insert(layers[i]).second) continue;
    MoeLayerData& last = *all.emplace_back(&layers[i]->data());
    backend_of(last.device).copy(last.statistics, last.statistics_before);
    const Communicator& batch = all.front()->batch;
    require(
        (batch.size() == 1 && last.batch.size() == 1) || &last.batch == &batch,
        "{}: layers 0 and {} have batches of {} and {} ranks, but all layers must share one batch",
        kRunStep, i, batch.size(), last.batch.size());
  }
  if (all.empty()) {
    step();
    return false;
  }
  const auto forget_statistics = [&] {
    for (const auto* layer : all) {
      backend_of(layer->device).copy(layer->statistics_before, layer->statistics);
    }
  };
  try {
    run_once(all, step);
    if (!any_overflow(all)) return false;
    forget_statistics();
    run_exactly(all, step);
    grow(all);
  } catch (...) {
    try {
      forget_statistics();
    } catch (const DeviceError&) {  // the GPU is lost: the first error says why
    }
    throw;
  }
  return true;
}

}  // namespace switchyard
