// SPDX-License-Identifier: Apache-2.0
// The accessors of Plan.
#include "switchyard/plan.h"

#include "core/require.h"
#include "moe/plan/plan_data.h"

namespace switchyard {

const PlanSummary& PlanData::summary() const {
  if (!is_known && reports) {
    const PeerReports fetched = reports->on_host(backend_of(device), backend_of(host), *placement);
    const PlanRecords records = records_of(fetched);
    const auto ranks = have_met(records) ? nullptr : check.lock();
    if (ranks != nullptr) ranks->check();
    require_same_call(records);
    known.fill(records, fetched.layout, options.sizing, rank);
  } else if (!is_known) {
    const PlanReport fetched = report.on_host(backend_of(device), backend_of(host), *placement);
    known.fill(record_of(fetched), fetched.layout, options.sizing, rank);
  }
  return known;
}

std::int64_t PlanData::row_capacity() const {
  return options.sizing.is_bounded() ? options.sizing.capacity() : summary().num_rows;
}

std::int64_t PlanData::token_capacity() const {
  return options.sizing.is_bounded() ? options.sizing.token_capacity() : summary().num_tokens;
}

std::int64_t PlanData::bytes() const {
  return report.all.bytes() + groups.all.bytes() + slots.bytes() + target_ranks.bytes() +
         sources.bytes() + row_sources.bytes() + (reports ? reports->all.bytes() : 0) +
         places.bytes() + sent_sources.bytes() + (route != nullptr ? route->bytes() : 0);
}

std::int64_t Plan::num_tokens() const { return data_->num_tokens; }
std::int64_t Plan::top_k() const { return data_->top_k; }
std::int64_t Plan::alignment() const { return data_->options.alignment; }
const PlanOptions& Plan::options() const { return data_->options; }
const ExpertPlacement& Plan::placement() const { return *data_->placement; }
int Plan::rank() const { return data_->rank; }

std::int64_t Plan::num_rows() const { return data_->summary().num_rows; }

std::int64_t Plan::row_capacity() const { return data_->row_capacity(); }

ConstTensorView Plan::row_offsets() const { return data_->groups.row_offsets; }
ConstTensorView Plan::group_rows() const { return data_->groups.group_rows; }
ConstTensorView Plan::slots() const { return data_->slots; }
ConstTensorView Plan::target_ranks() const { return data_->target_ranks; }
ConstTensorView Plan::sources() const {
  return data_->sources.slice(0, data_->summary().num_sources);
}
ConstTensorView Plan::source_offsets() const { return data_->groups.source_offsets; }
ConstTensorView Plan::row_sources() const {
  const int num_ranks = data_->placement->num_ranks();
  require<Unsupported>(num_ranks == 1,
                       "a plan over {} ranks has no row_sources, because some rows come from other "
                       "ranks' tokens: use Dispatcher::dispatch",
                       num_ranks);
  return data_->row_sources;
}

namespace {

void require_rank(int rank, const ExpertPlacement& placement, std::string_view name) {
  require(0 <= rank && rank < placement.num_ranks(), "{} ({}) must be one of the plan's {} ranks",
          name, rank, placement.num_ranks());
}

}  // namespace

std::span<const std::int32_t> Plan::counts(int rank) const {
  require_rank(rank, *data_->placement, "rank");
  const auto num_experts = static_cast<std::size_t>(data_->placement->num_experts());
  return std::span(data_->summary().counts)
      .subspan(static_cast<std::size_t>(rank) * num_experts, num_experts);
}

std::int64_t Plan::distinct_tokens(int source, int target) const {
  require_rank(source, *data_->placement, "source");
  require_rank(target, *data_->placement, "target");
  const auto index = source * data_->placement->num_ranks() + target;
  return data_->summary().distinct_tokens[static_cast<std::size_t>(index)];
}

PlanStatus Plan::status() const { return data_->summary().status; }

void Plan::check() const { check_status(data_->summary().status, data_->options.sizing); }

}  // namespace switchyard
