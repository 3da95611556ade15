// SPDX-License-Identifier: Apache-2.0
// Carves a plan's tables out of the caller's tensor and runs the device's functions on them.
#include "switchyard/local_plan.h"

#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/check_tensors.h"
#include "moe/dispatch/mover.h"
#include "moe/plan/plan_maker.h"

namespace switchyard {
namespace {

std::int64_t padded(std::int64_t words) { return TablePieces::padded(words); }

// Returns the most rows that any routing can need, padding included. T · K must fit in 32 bits.
std::int64_t enough_rows(const LocalPlanOptions& o) {
  const std::int64_t rows = o.num_tokens * o.top_k;
  // Only groups with rows are padded, and there are at most as many of those as rows.
  const std::int64_t groups = std::min<std::int64_t>(o.num_experts, rows);
  return (rows + groups * (o.alignment - 1)) / o.alignment * o.alignment;
}

void require_valid(const LocalPlanOptions& o) {
  require(o.num_tokens >= 0, "num_tokens ({}) must not be negative", o.num_tokens);
  require(o.top_k > 0, "top_k ({}) must be positive", o.top_k);
  require(o.num_experts > 0, "num_experts ({}) must be positive", o.num_experts);
  require(0 < o.alignment && o.alignment <= std::numeric_limits<std::int32_t>::max(),
          "alignment ({}) must be 1 to 2^31 - 1", o.alignment);
  require(o.num_tokens <= std::numeric_limits<std::int32_t>::max() / o.top_k &&
              enough_rows(o) <= std::numeric_limits<std::int32_t>::max(),
          "{} tokens with {} picks each, aligned to {}, need more than 2^31 rows", o.num_tokens,
          o.top_k, o.alignment);
}

// The placement tables of a single rank that owns all experts.
struct Placement {
  ConstTensorView owners;
  ConstTensorView experts_by_rank;
  ConstTensorView rank_offsets;
};

Placement placement_on(const Device& device, int num_experts) {
  const auto e = static_cast<std::size_t>(num_experts);
  std::vector<std::int32_t> words(2 * e + 2);
  std::iota(words.begin() + num_experts, words.begin() + 2 * num_experts, 0);
  words.back() = num_experts;
  const ConstTensorView all = backend_of(device).constant(words);
  return {all.slice(0, num_experts), all.slice(num_experts, 2 * num_experts),
          all.slice(2 * num_experts, 2 * num_experts + 2)};
}

}  // namespace

std::int64_t LocalPlanOptions::most_rows() const {
  require_valid(*this);
  return enough_rows(*this);
}

std::int64_t LocalPlanOptions::num_words() const {
  require_valid(*this);
  const std::int64_t experts = num_experts;
  const std::int64_t picks = num_tokens * top_k;
  return padded(2 * kProblemWords) + padded(2 * layout_words(1)) + 5 * padded(experts) + padded(1) +
         2 * padded(experts + 1) + 3 * padded(picks) + padded(enough_rows(*this));
}
LocalPlan::LocalPlan(Device device, const LocalPlanOptions& options, const TensorView& memory)
    : device_(std::move(device)), options_(options) {
  require(memory.dtype() == Dtype::i32 && memory.shape() == Shape{options.num_words()},
          "the plan's tensor is {} {}, but must be i32 [{}]", name_of(memory.dtype()),
          memory.shape(), options.num_words());
  require_memory(memory, device_.memory(), "the plan's tensor");
  require(reinterpret_cast<std::uintptr_t>(memory.data()) % 8 == 0,
          "the plan's tensor must be aligned to 8 bytes");
  const std::int64_t experts = options.num_experts;
  const Shape picks{options.num_tokens, options.top_k};
  TablePieces pieces(memory);
  problems_ = pieces.take({kProblemWords}, Dtype::i64);
  layout_ = pieces.take({layout_words(1)}, Dtype::i64);
  counts_ = pieces.take({1, experts});
  distinct_tokens_ = pieces.take({1});
  expert_offsets_ = pieces.take({experts});
  rows_before_ = pieces.take({experts});
  kept_rows_ = pieces.take({experts});
  group_rows_ = pieces.take({experts});
  source_offsets_ = pieces.take({experts + 1});
  row_offsets_ = pieces.take({experts + 1});
  slots_ = pieces.take(picks);
  target_ranks_ = pieces.take(picks);
  sources_ = pieces.take({picks.num_elements()});
  row_sources_ = pieces.take({options.most_rows()});
  check_invariant(pieces.words() == options.num_words(), "a plan has {} words instead of {}",
                  pieces.words(), options.num_words());
}

void LocalPlan::make(const ConstTensorView& expert_ids) const {
  const Shape picks{options_.num_tokens, options_.top_k};
  require((expert_ids.dtype() == Dtype::i32 || expert_ids.dtype() == Dtype::i64) &&
              expert_ids.shape() == picks,
          "expert_ids is {} {}, but must be i32 or i64 {}", name_of(expert_ids.dtype()),
          expert_ids.shape(), picks);
  require_memory(expert_ids, device_.memory(), "expert_ids");
  const DeviceBackend& device = backend_of(device_);
  const Placement placement = placement_on(device_, options_.num_experts);
  device.plan_alone({.expert_ids = expert_ids,
                     .first_sentinel = first_sentinel(options_.num_experts, options_.sentinel_ids),
                     .count = {.owners = placement.owners,
                               .allow_duplicates = options_.duplicate_ids == DuplicateIds::allow,
                               .counts = flat(counts_),
                               .distinct_tokens = distinct_tokens_,
                               .positions = flat(slots_),
                               .problems = problems_},
                     .layout = {.counts = counts_,
                                .owners = placement.owners,
                                .experts_by_rank = placement.experts_by_rank,
                                .rank_offsets = placement.rank_offsets,
                                .alignment = options_.alignment,
                                .sizing = Sizing::bounded(options_.most_rows()),
                                .expert_offsets = expert_offsets_,
                                .rows_before = rows_before_,
                                .kept_rows = kept_rows_,
                                .row_offsets = row_offsets_,
                                .group_rows = group_rows_,
                                .source_offsets = source_offsets_,
                                .layout = layout_},
                     .slots = {.owners = placement.owners,
                               .expert_offsets = expert_offsets_,
                               .rows_before = rows_before_,
                               .kept_rows = kept_rows_,
                               .source_offsets = source_offsets_,
                               .positions = flat(slots_),
                               .slots = flat(slots_),
                               .target_ranks = flat(target_ranks_),
                               .sources = sources_,
                               .row_sources = row_sources_}});
  if (device_.memory() == Memory::host) check();
}

void LocalPlan::check() const {
  std::array<std::int64_t, kProblemWords> words{};
  backend_of(device_).fetch(problems_, std::as_writable_bytes(std::span(words)));
  RecordHeader header;
  add_problems(header, ConstTensorView(words.data(), {kProblemWords}));
  const PlanRecords records{.headers = {header}, .counts = {}, .distinct_tokens = {}};
  const auto message = describe_bad_ids(records, options_.num_experts);
  require(message.empty(), "{}", message);
}

std::int64_t LocalPlan::num_rows() const {
  std::array<std::int64_t, layout_words(1)> words{};
  backend_of(device_).fetch(layout_, std::as_writable_bytes(std::span(words)));
  return words[used_rows_word(1, 0)];
}

RowGroups LocalPlan::groups() const { return {row_offsets_, group_rows_, options_.alignment}; }

namespace {

// Checks that tensors fit a plan. On a GPU the host does not know how many rows the plan has.
struct LocalChecks {
  const Device& device;
  const LocalPlanOptions& options;
  Dtype dtype;
  std::int64_t hidden;

  LocalChecks(const Device& device_of_plan, const LocalPlanOptions& plan,
              const ConstTensorView& tokens)
      : device(device_of_plan),
        options(plan),
        dtype(tokens.dtype()),
        hidden(tokens.shape().rank() == 2 ? tokens.shape()[1] : 0) {
    require(is_real(dtype), "tokens are f32 or bf16, not {}", name_of(dtype));
  }

  void tokens(const ConstTensorView& view, std::string_view name) const {
    const Shape expected{options.num_tokens, hidden};
    require(view.dtype() == dtype && view.shape() == expected,
            "{} is {} {}, but the plan has tokens {} {}", name, name_of(view.dtype()), view.shape(),
            name_of(dtype), expected);
    require_memory(view, device.memory(), name);
  }
  void rows(const ConstTensorView& view, std::string_view name) const {
    require(view.dtype() == dtype && view.shape().rank() == 2 && view.shape()[1] == hidden &&
                view.is_contiguous(),
            "{} is {} {} with row stride {}, but must be contiguous {} [R,{}]", name,
            name_of(view.dtype()), view.shape(), view.row_stride(), name_of(dtype), hidden);
    require_memory(view, device.memory(), name);
  }
  void weights(const std::optional<ConstTensorView>& view, std::string_view name) const {
    if (!view) return;
    const Shape expected{options.num_tokens, options.top_k};
    require(view->dtype() == Dtype::f32 && view->shape() == expected && view->is_contiguous(),
            "{} is {} {}, but must be contiguous f32 {}", name, name_of(view->dtype()),
            view->shape(), expected);
    require_memory(*view, device.memory(), name);
  }
  void row_weights(const std::optional<ConstTensorView>& view, std::int64_t num_rows,
                   std::string_view name) const {
    if (!view) return;
    require(
        view->dtype() == Dtype::f32 && view->shape() == Shape{num_rows} && view->is_contiguous(),
        "{} is {} {}, but must be contiguous f32 [{}]", name, name_of(view->dtype()), view->shape(),
        num_rows);
    require_memory(*view, device.memory(), name);
  }
};

// Checks that there are enough rows for the plan. Skipped on a GPU, where the host would have to
// wait for the number of rows.
void require_room(const LocalPlan& plan, const Device& device, std::int64_t num_rows) {
  if (device.memory() != Memory::host) return;
  require(num_rows >= plan.num_rows(), "there are {} rows, but the plan needs {}", num_rows,
          plan.num_rows());
}

}  // namespace

RowTable LocalPlan::table(std::span<std::byte* const> rows) const {
  return {.count = options_.num_tokens,
          .width = options_.top_k,
          .slots = indices(slots_),
          .bases = rows};
}

PadRows LocalPlan::pads(const TensorView& rows, const std::optional<TensorView>& scalars) const {
  return {.rows = rows, .scalars = scalars, .row_offsets = row_offsets_, .group_rows = group_rows_};
}

void LocalPlan::dispatch(const DispatchInput& in, const DispatchOutput& out) const {
  const LocalChecks expect(device_, options_, in.x);
  expect.tokens(in.x, "x");
  expect.rows(out.rows, "rows");
  expect.weights(in.weights, "weights");
  expect.row_weights(out.row_weights, out.rows.rows(), "row_weights");
  require_apart(in.x, out.rows, "x and rows");
  require(in.weights.has_value() == out.row_weights.has_value(),
          "weights and row_weights go together");
  require_room(*this, device_, out.rows.rows());
  const std::array<std::byte*, 1> rows{out.rows.data()};
  const std::array<std::byte*, 1> scalars{out.row_weights ? out.row_weights->data() : nullptr};
  backend_of(device_).scatter_rows({.from = in.x,
                                    .to = table(rows),
                                    .scalars = floats_of(in.weights),
                                    .scalar_bases = scalars,
                                    .pads = pads(out.rows, out.row_weights)});
}

void LocalPlan::combine(const CombineInput& in, const TensorView& y) const {
  const LocalChecks expect(device_, options_, y);
  expect.tokens(y, "y");
  expect.rows(in.rows, "rows");
  expect.weights(in.weights, "weights");
  require_apart(in.rows, y, "rows and y");
  require_room(*this, device_, in.rows.rows());
  const std::array<std::byte*, 1> rows{const_cast<std::byte*>(in.rows.data())};
  backend_of(device_).gather_rows({.from = table(rows), .weights = floats_of(in.weights), .to = y});
}

void LocalPlan::combine_backward(const CombineBackwardInput& in,
                                 const CombineBackwardOutput& out) const {
  const LocalChecks expect(device_, options_, in.d_y);
  expect.tokens(in.d_y, "d_y");
  expect.rows(out.d_rows, "d_rows");
  require_apart(in.d_y, out.d_rows, "d_y and d_rows");
  expect.weights(in.weights, "weights");
  expect.weights(out.d_weights, "d_weights");
  require(in.rows.has_value() == out.d_weights.has_value(), "rows and d_weights go together");
  require_room(*this, device_, out.d_rows.rows());
  if (in.rows) {
    expect.rows(*in.rows, "rows");
    require_room(*this, device_, in.rows->rows());
    const std::array<std::byte*, 1> rows{const_cast<std::byte*>(in.rows->data())};
    backend_of(device_).dot_rows(
        {.with = in.d_y, .rows = table(rows), .dots = floats_of(out.d_weights)});
  }
  const std::array<std::byte*, 1> d_rows{out.d_rows.data()};
  backend_of(device_).scatter_rows({.from = in.d_y,
                                    .scale = floats_of(in.weights),
                                    .to = table(d_rows),
                                    .pads = pads(out.d_rows, {})});
}

void LocalPlan::dispatch_backward(const DispatchBackwardInput& in,
                                  const DispatchBackwardOutput& out) const {
  const LocalChecks expect(device_, options_, out.d_x);
  expect.tokens(out.d_x, "d_x");
  expect.rows(in.d_rows, "d_rows");
  require_apart(in.d_rows, out.d_x, "d_rows and d_x");
  expect.row_weights(in.d_row_weights, in.d_rows.rows(), "d_row_weights");
  expect.weights(out.d_weights, "d_weights");
  require(in.d_row_weights.has_value() == out.d_weights.has_value(),
          "d_row_weights and d_weights go together");
  require_room(*this, device_, in.d_rows.rows());
  const std::array<std::byte*, 1> rows{const_cast<std::byte*>(in.d_rows.data())};
  const std::array<std::byte*, 1> scalars{
      in.d_row_weights ? const_cast<std::byte*>(in.d_row_weights->data()) : nullptr};
  backend_of(device_).gather_rows({.from = table(rows),
                                   .to = out.d_x,
                                   .scalar_bases = scalars,
                                   .scalars = floats_of(out.d_weights)});
}

}  // namespace switchyard
