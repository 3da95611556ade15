// SPDX-License-Identifier: Apache-2.0
// Fills LayerStats.
#include "moe/layer/moe_layer_data.h"
#include "moe/plan/plan_data.h"

namespace switchyard {

StageClock::StageClock(const DeviceBackend& device, std::vector<LayerStats::Stage>& stages,
                       std::shared_ptr<StageTimer>& timer)
    : stages_(stages), is_host_(device.memory() == Memory::host) {
  stages.clear();
  timer = is_host_ ? nullptr : device.time_stages();
  timer_ = timer.get();
}

void StageClock::end(std::string_view name) {
  if (is_host_) return add(name, since_last());
  if (timer_ != nullptr) timer_->end(name);
}

double StageClock::since_last() {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  return seconds;
}

void StageClock::end_experts(const WorkTimes& spent) {
  if (!is_host_) return end("experts");
  const double seconds = since_last();
  const auto other = static_cast<double>(spent.other_ns);
  const double total = static_cast<double>(spent.gemm_ns) + other;
  const double other_share = total > 0.0 ? other / total : 0.0;
  add("experts", seconds * (1.0 - other_share));
  add("activation", seconds * other_share);
}

std::vector<LayerStats::Stage> stages_of(const std::shared_ptr<StageTimer>& timer) {
  std::vector<LayerStats::Stage> stages;
  if (timer == nullptr) return stages;
  for (const auto& [name, seconds] : timer->read()) stages.push_back({name, seconds});
  return stages;
}

void describe_plan(const Plan& plan, LayerStats& stats) {
  const PlanSummary& known = data_of(plan).summary();
  const auto& placement = plan.placement();
  const auto num_experts = static_cast<std::size_t>(placement.num_experts());
  const auto num_ranks = static_cast<std::size_t>(placement.num_ranks());
  const auto row_bytes = plan.options().hidden * size_of(plan.options().dtype);
  stats.rows_by_expert.assign(num_experts, 0);
  stats.rows_by_rank.assign(num_ranks, 0);
  stats.bytes_by_expert.assign(num_experts, 0);
  stats.bytes_by_rank.assign(num_ranks, 0);
  for (std::size_t i = 0; i < known.counts.size(); ++i) {
    stats.rows_by_expert[i % num_experts] += known.counts[i];
  }
  for (std::size_t e = 0; e < num_experts; ++e) {
    const auto owner = static_cast<std::size_t>(placement.owner(static_cast<int>(e)));
    stats.rows_by_rank[owner] += stats.rows_by_expert[e];
    stats.bytes_by_expert[e] = stats.rows_by_expert[e] * row_bytes;
  }
  stats.dropped_by_rank = known.status.dropped;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    stats.rows_by_rank[r] -= stats.dropped_by_rank[r];
    stats.bytes_by_rank[r] = stats.rows_by_rank[r] * row_bytes;
  }
  stats.overflow = known.status.overflow;
}

}  // namespace switchyard
