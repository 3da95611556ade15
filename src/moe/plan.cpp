// Makes plans: from everybody's counts to row offsets, and from those to the slot of every
// assignment.
#include "switchyard/plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/require.h"
#include "device/device_backend.h"
#include "moe/plan_data.h"
#include "moe/plan_record.h"

namespace switchyard {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Asks for memory that is soon to be written here and there: after the rows of the last step, none
// of it is in a cache any more, and all of it at once is faster than one miss after the other.
void fetch_ahead(const Tensor& table) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t i = 0; i < table.bytes(); i += kLine) __builtin_prefetch(table.data() + i, 1);
}

// Where the groups of all experts lie at their owners, and how much of them there is room for.
struct Layout {
  std::vector<std::int32_t> row_offsets;  // [E]
  std::vector<std::int32_t> kept_rows;    // [E]
  std::vector<std::int64_t> total_rows;   // [E] over all ranks
  std::vector<std::int64_t> used_rows;    // [ranks]
};

// The highest level such that a rank's groups, each cut at it, fit into its capacity.
std::int64_t fitting_rows(std::span<const std::int32_t> experts,
                          const std::vector<std::int64_t>& total_rows, std::int64_t alignment,
                          std::int64_t capacity) {
  std::int64_t low = 0;
  std::int64_t high = capacity;
  while (low < high) {
    const std::int64_t level = (low + high + 1) / 2;
    std::int64_t rows = 0;
    for (const auto e : experts) {
      rows += round_up(std::min(total_rows[static_cast<std::size_t>(e)], level), alignment);
    }
    if (rows <= capacity) {
      low = level;
    } else {
      high = level - 1;
    }
  }
  return low;
}

std::vector<std::int64_t> sum_over_ranks(const std::vector<std::int32_t>& counts,
                                         std::size_t num_experts) {
  std::vector<std::int64_t> totals(num_experts, 0);
  for (std::size_t i = 0; i < counts.size(); ++i) totals[i % num_experts] += counts[i];
  return totals;
}

// How many rows each of a rank's experts keeps when they do not all fit: up to a common level, and
// what is left over goes to them in turn, a block of the alignment each.
std::vector<std::int64_t> rows_that_fit(std::span<const std::int32_t> experts,
                                        const std::vector<std::int64_t>& total_rows,
                                        std::int64_t alignment, std::int64_t capacity) {
  const auto level = fitting_rows(experts, total_rows, alignment, capacity);
  std::vector<std::int64_t> kept;
  std::int64_t left = capacity;
  for (const auto e : experts) {
    kept.push_back(std::min(total_rows[static_cast<std::size_t>(e)], level));
    left -= round_up(kept.back(), alignment);
  }
  for (std::size_t i = 0; i < experts.size() && left >= alignment; ++i) {
    const auto wanted = total_rows[static_cast<std::size_t>(experts[i])];
    if (kept[i] == wanted) continue;
    kept[i] = std::min(wanted, round_up(kept[i], alignment) + alignment);
    left -= alignment;
  }
  return kept;
}

void lay_out_rank(int rank, const Plan::Data& plan, Layout& layout, PlanStatus& status) {
  const auto experts = plan.placement->experts_of(rank);
  const auto alignment = plan.options.alignment;
  std::vector<std::int64_t> wanted;
  std::int64_t needed = 0;
  std::int64_t asked = 0;
  for (const auto e : experts) {
    wanted.push_back(layout.total_rows[static_cast<std::size_t>(e)]);
    needed += round_up(wanted.back(), alignment);
    asked += wanted.back();
  }
  const Sizing& sizing = plan.options.sizing;
  constexpr auto kMaxRows = std::int64_t{std::numeric_limits<std::int32_t>::max()};
  const auto most = sizing.is_bounded() ? asked : needed;
  require(most <= kMaxRows, "rank {} would receive {} rows; at most {} are supported on one rank",
          rank, most, std::int64_t{kMaxRows});
  const bool overflow = sizing.is_bounded() && needed > sizing.capacity();
  const auto capacity = sizing.is_bounded() ? sizing.capacity() : needed;
  const auto kept = overflow && sizing.overflow() == Overflow::drop
                        ? rows_that_fit(experts, layout.total_rows, alignment, capacity)
                        : std::move(wanted);
  std::int64_t offset = 0;
  std::int64_t total_kept = 0;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = static_cast<std::size_t>(experts[i]);
    const auto rows = std::min(kept[i], capacity - offset);
    layout.row_offsets[e] = static_cast<std::int32_t>(offset);
    layout.kept_rows[e] = static_cast<std::int32_t>(rows);
    offset = std::min(offset + round_up(rows, alignment), capacity);
    total_kept += rows;
  }
  layout.used_rows.push_back(offset);
  status.overflow = status.overflow || overflow;
  status.needed_rows.push_back(needed);
  status.dropped.push_back(asked - total_kept);
}

Layout lay_out(const Plan::Data& plan, PlanStatus& status) {
  const auto num_experts = static_cast<std::size_t>(plan.placement->num_experts());
  Layout layout;
  layout.row_offsets.resize(num_experts);
  layout.kept_rows.resize(num_experts);
  layout.total_rows = sum_over_ranks(plan.counts, num_experts);
  status.available_rows = plan.options.sizing.capacity();
  for (int r = 0; r < plan.placement->num_ranks(); ++r) lay_out_rank(r, plan, layout, status);
  return layout;
}

void fill_own_groups(const Layout& layout, Plan::Data& plan) {
  const auto experts = plan.placement->experts_of(plan.rank);
  const auto num_local = static_cast<std::int64_t>(experts.size());
  plan.row_offsets = Tensor({num_local + 1}, Dtype::i32);
  plan.group_rows = Tensor({num_local}, Dtype::i32);
  const auto offsets = plan.row_offsets.span<std::int32_t>();
  const auto rows = plan.group_rows.span<std::int32_t>();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    offsets[i] = layout.row_offsets[static_cast<std::size_t>(experts[i])];
    rows[i] = layout.kept_rows[static_cast<std::size_t>(experts[i])];
  }
  offsets.back() = static_cast<std::int32_t>(layout.used_rows[static_cast<std::size_t>(plan.rank)]);
}

void fill_slots(const ConstTensorView& expert_ids, const Layout& layout,
                const DeviceBackend& device, Plan::Data& plan) {
  const auto num_experts = static_cast<std::size_t>(plan.placement->num_experts());
  std::vector<std::int32_t> rows_before(num_experts, 0);
  for (int s = 0; s < plan.rank; ++s) {
    for (std::size_t e = 0; e < num_experts; ++e) {
      rows_before[e] += plan.counts[static_cast<std::size_t>(s) * num_experts + e];
    }
  }
  for (std::size_t e = 0; e < num_experts; ++e) {  // beyond what is kept, it makes no difference
    rows_before[e] = std::min(rows_before[e], layout.kept_rows[e]);
  }
  const auto own = std::span(plan.counts)
                       .subspan(static_cast<std::size_t>(plan.rank) * num_experts, num_experts);
  plan.source_offsets = Tensor({static_cast<std::int64_t>(num_experts) + 1}, Dtype::i32);
  const auto source_offsets = plan.source_offsets.span<std::int32_t>();
  source_offsets[0] = 0;
  std::inclusive_scan(own.begin(), own.end(), source_offsets.begin() + 1);
  device.assign_slots({.expert_ids = expert_ids,
                       .owners = plan.placement->owners(),
                       .row_offsets = layout.row_offsets,
                       .rows_before = rows_before,
                       .kept_rows = layout.kept_rows,
                       .source_offsets = source_offsets,
                       .slots = plan.slots.span<std::int32_t>(),
                       .target_ranks = plan.target_ranks.span<std::int32_t>(),
                       .sources = plan.sources.span<std::int32_t>()});
}

void require_sound_routing(const PlanStatus& status) {
  require(!status.non_finite, "{}", status.non_finite_message);
  require(!status.bad_ids, "{}", status.bad_ids_message);
}

}  // namespace

Planner::Planner(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
                 Device device)
    : comm_(comm),
      placement_(std::make_shared<const ExpertPlacement>(std::move(placement))),
      options_(options),
      device_(std::move(device)),
      id_(comm.next_object_id()) {
  require_same_options(comm, *placement_, options, id_);
}

void Planner::resize(const Sizing& sizing) {
  if (sizing.is_bounded()) require_valid_capacity(sizing.capacity(), options_.alignment);
  options_.sizing = sizing;
}

std::shared_ptr<Plan::Data> Planner::plan_data(const ConstTensorView& expert_ids,
                                               std::int64_t first_non_finite_token) {
  auto data = std::make_shared<Plan::Data>();
  data->placement = placement_;
  data->options = options_;
  data->rank = comm_.rank();
  RecordHeader header{.planner_id = id_,
                      .plan_number = num_plans_,
                      .ids_dtype = static_cast<std::int64_t>(expert_ids.dtype()),
                      .ids_dims = expert_ids.shape().rank(),
                      .num_tokens = expert_ids.rows(),
                      .top_k = expert_ids.shape().rank() == 2 ? expert_ids.shape()[1] : 0,
                      .non_finite_token = first_non_finite_token,
                      .capacity = options_.sizing.is_bounded() ? options_.sizing.capacity() : -1,
                      .overflow = static_cast<std::int64_t>(options_.sizing.overflow())};
  std::vector<std::int32_t> counts(static_cast<std::size_t>(placement_->num_experts()));
  std::vector<std::int32_t> distinct(static_cast<std::size_t>(comm_.size()));
  if (has_valid_form(header)) {
    data->num_tokens = header.num_tokens;
    data->top_k = header.top_k;
    data->slots = Tensor(expert_ids.shape(), Dtype::i32);
    data->target_ranks = Tensor(expert_ids.shape(), Dtype::i32);
    data->sources = Tensor({expert_ids.shape().num_elements()}, Dtype::i32);
    for (const Tensor* table : {&data->slots, &data->target_ranks, &data->sources}) {
      fetch_ahead(*table);
    }
    const BadId bad = device_.backend().count_assignments(
        {.expert_ids = expert_ids,
         .owners = placement_->owners(),
         .allow_duplicates = options_.duplicate_ids == DuplicateIds::allow,
         .counts = counts,
         .distinct_tokens = distinct,
         .positions = data->slots.span<std::int32_t>()});
    header.bad_token = bad.token;
    header.bad_k = bad.k;
    header.bad_id = bad.id;
    header.bad_is_duplicate = bad.is_duplicate ? 1 : 0;
  }
  PlanRecords records = exchange_records(comm_, header, counts, distinct);
  require_same_call(records);
  data->plan_number = num_plans_++;
  data->status.bad_ids_message = describe_bad_ids(records, placement_->num_experts());
  data->status.bad_ids = !data->status.bad_ids_message.empty();
  data->status.non_finite_message = describe_non_finite(records);
  data->status.non_finite = !data->status.non_finite_message.empty();
  if (!options_.sizing.is_bounded()) require_sound_routing(data->status);
  data->counts = std::move(records.counts);
  data->distinct_tokens = std::move(records.distinct_tokens);
  const Layout layout = lay_out(*data, data->status);
  fill_own_groups(layout, *data);
  fill_slots(expert_ids, layout, device_.backend(), *data);
  return data;
}

std::int64_t Plan::num_tokens() const { return data_->num_tokens; }
std::int64_t Plan::top_k() const { return data_->top_k; }
std::int64_t Plan::alignment() const { return data_->options.alignment; }
const PlanOptions& Plan::options() const { return data_->options; }
const ExpertPlacement& Plan::placement() const { return *data_->placement; }
int Plan::rank() const { return data_->rank; }

std::int64_t Plan::num_rows() const { return data_->row_offsets.span<std::int32_t>().back(); }

std::int64_t Plan::row_capacity() const {
  const Sizing& sizing = data_->options.sizing;
  return sizing.is_bounded() ? sizing.capacity() : num_rows();
}

ConstTensorView Plan::row_offsets() const { return data_->row_offsets; }
ConstTensorView Plan::group_rows() const { return data_->group_rows; }
ConstTensorView Plan::slots() const { return data_->slots; }
ConstTensorView Plan::target_ranks() const { return data_->target_ranks; }
ConstTensorView Plan::sources() const {
  return data_->sources.view().slice(0, data_->source_offsets.span<std::int32_t>().back());
}
ConstTensorView Plan::source_offsets() const { return data_->source_offsets; }

std::span<const std::int32_t> Plan::counts(int rank) const {
  const auto num_experts = static_cast<std::size_t>(data_->placement->num_experts());
  return std::span(data_->counts)
      .subspan(static_cast<std::size_t>(rank) * num_experts, num_experts);
}

std::int64_t Plan::distinct_tokens(int source, int target) const {
  const auto index = source * data_->placement->num_ranks() + target;
  return data_->distinct_tokens[static_cast<std::size_t>(index)];
}

const PlanStatus& Plan::status() const { return data_->status; }

void Plan::check() const { check_status(data_->status, data_->options.sizing); }

void check_status(const PlanStatus& status, const Sizing& sizing) {
  require_sound_routing(status);
  if (!status.overflow || sizing.overflow() == Overflow::drop) return;
  const auto most = std::ranges::max_element(status.needed_rows);
  throw InvalidArgument(fmt::format(
      "overflow: rank {} needs {} rows, but the capacity is {} on every rank; give the plan a "
      "capacity of at least {}, or exact sizing",
      most - status.needed_rows.begin(), *most, status.available_rows, *most));
}

}  // namespace switchyard
