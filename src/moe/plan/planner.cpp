// Makes plans: counts on the device, tells the other ranks, lays out the groups, and finds the slot
// of every assignment.
#include <array>

#include "comm/agreement.h"
#include "core/require.h"
#include "core/row_bytes.h"
#include "moe/check_tensors.h"
#include "moe/plan/plan_data.h"

namespace switchyard {

// The placement where the device can read it, and where the host can.
struct Planner::Tables {
  PlacementTables on_device;
  PlacementTables on_host;
};

namespace {

TensorView flat(const TensorView& contiguous) {
  return {contiguous.data(),  contiguous.dtype(), {contiguous.shape().num_elements()}, 1,
          contiguous.owner(), contiguous.memory()};
}

// Counts [ranks, E] and everything that depends on them are in one memory, that of the groups.
LayOut layout_of(const ConstTensorView& counts, const PlacementTables& placement,
                 const Plan::Data& data, const GroupTables& groups, const TensorView& layout) {
  return {.counts = counts,
          .owners = placement.owners,
          .experts_by_rank = placement.experts_by_rank,
          .rank_offsets = placement.rank_offsets,
          .rank = data.rank,
          .alignment = data.options.alignment,
          .sizing = data.options.sizing,
          .expert_offsets = groups.expert_offsets,
          .rows_before = groups.rows_before,
          .kept_rows = groups.kept_rows,
          .row_offsets = groups.row_offsets,
          .group_rows = groups.group_rows,
          .source_offsets = groups.source_offsets,
          .layout = layout};
}

// Groups are laid out, and slots hold positions.
void assign_slots(const ConstTensorView& expert_ids, const TensorView& owners, Plan::Data& data) {
  AssignSlots args{.expert_ids = expert_ids,
                   .owners = owners,
                   .expert_offsets = data.groups.expert_offsets,
                   .rows_before = data.groups.rows_before,
                   .kept_rows = data.groups.kept_rows,
                   .source_offsets = data.groups.source_offsets,
                   .slots = flat(data.slots),
                   .target_ranks = flat(data.target_ranks),
                   .sources = data.sources};
  if (data.placement->num_ranks() == 1) {
    data.row_sources = data.device.backend().take({data.row_capacity()}, Dtype::i32);
    args.row_sources = data.row_sources;
  }
  data.device.backend().assign_slots(args);
}

void require_words(const PlanProblems& problems, Memory memory) {
  const auto check = [&](const ConstTensorView& words, std::int64_t size, std::string_view name) {
    require(words.dtype() == Dtype::i64 && words.shape() == Shape{size} && words.is_contiguous(),
            "{} is {} {}, but must be contiguous i64 [{}]", name, name_of(words.dtype()),
            words.shape().to_string(), size);
    require_memory(words, memory, name);
  };
  check(problems.words, kProblemWords, "problems.words");
  if (problems.step) check(*problems.step, kStepWords, "problems.step");
}

}  // namespace

Planner::Planner(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
                 Device device)
    : comm_(comm),
      placement_(std::make_shared<const ExpertPlacement>(std::move(placement))),
      options_(options),
      device_(std::move(device)),
      host_(device_.memory() == Memory::host ? device_ : Device()),
      id_(ObjectIds::next(comm)) {
  require_same_options(comm, *placement_, options, id_);
  const auto on_device = PlacementTables::make(device_.backend(), *placement_);
  tables_ = std::make_shared<const Tables>(
      Tables{on_device, device_.memory() == Memory::host
                            ? on_device
                            : PlacementTables::make(host_.backend(), *placement_)});
}

void Planner::resize(const Sizing& sizing) {
  if (sizing.is_bounded()) require_valid_capacity(sizing.capacity(), options_.alignment);
  options_.sizing = sizing;
}

Plan Planner::plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token) {
  return Plan(plan_data(expert_ids, problems_of(first_non_finite_token)));
}

Plan Planner::plan(const ConstTensorView& expert_ids, const PlanProblems& problems) {
  return Plan(plan_data(expert_ids, problems));
}

PlanProblems Planner::problems_of(std::int64_t first_non_finite_token) const {
  const std::array<std::int64_t, kProblemWords> words{first_non_finite_token, -1};
  const TensorView uploaded = device_.backend().take({kProblemWords}, Dtype::i64);
  device_.backend().upload(std::as_bytes(std::span(words)), uploaded);
  return {.words = uploaded};
}

std::shared_ptr<Plan::Data> Planner::plan_data(const ConstTensorView& expert_ids,
                                               const PlanProblems& problems) {
  check_arguments({&comm_}, "plan", [&] { require_words(problems, device_.memory()); });
  auto data = std::make_shared<Plan::Data>(Plan::Data{.placement = placement_,
                                                      .options = options_,
                                                      .device = device_,
                                                      .host = host_,
                                                      .rank = comm_.rank()});
  const RecordHeader header = header_of(expert_ids);
  data->plan_number = num_plans_;
  data->report = PlanReport::take(device_.backend(), *placement_);
  if (has_valid_form(header)) count(expert_ids, problems, *data);
  if (comm_.size() == 1) {
    plan_alone(header, problems, *data);
  } else {
    plan_together(header, *data);
  }
  assign_slots(expert_ids, tables_->on_device.owners, *data);
  return data;
}

RecordHeader Planner::header_of(const ConstTensorView& expert_ids) const {
  return {.planner_id = id_,
          .plan_number = num_plans_,
          .ids_dtype = static_cast<std::int64_t>(expert_ids.dtype()),
          .ids_dims = expert_ids.shape().rank(),
          .ids_memory = static_cast<std::int64_t>(expert_ids.memory()),
          .device_memory = static_cast<std::int64_t>(device_.memory()),
          .num_tokens = expert_ids.rows(),
          .top_k = expert_ids.shape().rank() == 2 ? expert_ids.shape()[1] : 0,
          .capacity = options_.sizing.is_bounded() ? options_.sizing.capacity() : -1,
          .overflow = static_cast<std::int64_t>(options_.sizing.overflow())};
}

void Planner::count(const ConstTensorView& expert_ids, const PlanProblems& problems,
                    Plan::Data& data) const {
  const DeviceBackend& device = device_.backend();
  data.num_tokens = expert_ids.rows();
  data.top_k = expert_ids.shape()[1];
  data.slots = device.take(expert_ids.shape(), Dtype::i32);
  data.target_ranks = device.take(expert_ids.shape(), Dtype::i32);
  data.sources = device.take({expert_ids.shape().num_elements()}, Dtype::i32);
  device.copy(problems.words, data.report.problems);
  device.count_assignments({.expert_ids = expert_ids,
                            .owners = tables_->on_device.owners,
                            .allow_duplicates = options_.duplicate_ids == DuplicateIds::allow,
                            .counts = flat(data.report.counts),
                            .distinct_tokens = data.report.distinct_tokens,
                            .positions = flat(data.slots),
                            .problems = data.report.problems});
}

// The device lays out what it counted; a bounded plan on a GPU waits for nothing.
void Planner::plan_alone(const RecordHeader& header, const PlanProblems& problems,
                         Plan::Data& data) {
  require_same_call({.headers = {header}});
  ++num_plans_;
  data.groups = GroupTables::take(device_.backend(), *placement_, data.rank);
  LayOut args =
      layout_of(data.report.counts, tables_->on_device, data, data.groups, data.report.layout);
  args.problems = data.report.problems;
  args.step = problems.step;
  device_.backend().lay_out(args);
  data.is_known = device_.memory() == Memory::host || !options_.sizing.is_bounded();
  if (!data.is_known) return;
  const auto report = data.report.on_host(device_.backend(), host_.backend(), *placement_);
  data.known.fill(record_of(report), report.layout, options_.sizing, data.rank);
  require_possible(data);
}

// The host lays out what the ranks have told each other.
void Planner::plan_together(RecordHeader header, Plan::Data& data) {
  PlanReport own = data.report;
  if (has_valid_form(header)) {
    own = own.on_host(device_.backend(), host_.backend(), *placement_);
    add_problems(header, own.problems);
  } else {  // which all ranks will hear of
    own = PlanReport::take(host_.backend(), *placement_);
    zero_rows(own.all);
  }
  const PlanRecords records = exchange_records(comm_, header, own.counts.span<std::int32_t>(),
                                               own.distinct_tokens.span<std::int32_t>());
  require_same_call(records);
  ++num_plans_;
  const ConstTensorView counts(records.counts.data(), {comm_.size(), placement_->num_experts()});
  const GroupTables groups = GroupTables::take(host_.backend(), *placement_, data.rank);
  host_.backend().lay_out(layout_of(counts, tables_->on_host, data, groups, own.layout));
  data.known.fill(records, own.layout, options_.sizing, data.rank);
  require_possible(data);
  data.groups = groups;
  if (device_.memory() == Memory::host) return;
  data.groups = GroupTables::take(device_.backend(), *placement_, data.rank);
  device_.backend().upload(bytes_of(ConstTensorView(groups.all)), data.groups.all);
}

void Planner::require_possible(const Plan::Data& data) const {
  if (!options_.sizing.is_bounded()) require_sound_routing(data.known.status);
  require_nameable_rows(data.known, *placement_, options_.sizing);
}

}  // namespace switchyard
