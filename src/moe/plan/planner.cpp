// SPDX-License-Identifier: Apache-2.0
// Makes plans: counts assignments on the device, exchanges the counts, lays out the groups, and
// finds the slot of every assignment.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "comm/agreement.h"
#include "core/check_memory.h"
#include "core/given.h"
#include "core/hash.h"
#include "core/held.h"
#include "core/require.h"
#include "core/row_bytes.h"
#include "moe/plan/plan_maker.h"

namespace switchyard {

namespace {

TensorView one_row(const TensorView& words) {
  return {words.data(), words.dtype(), {1, words.rows()},
          words.rows(), words.owner(), words.memory()};
}

// Returns the first `count` columns.
TensorView columns(const TensorView& rows, std::int64_t count) {
  return {rows.data(),       rows.dtype(), {rows.rows(), count},
          rows.row_stride(), rows.owner(), rows.memory()};
}

// Throws if received tokens times K do not fit in 32 bits, since every row stores its source, d·K +
// k.
void require_nameable_sources(std::span<const std::int64_t> tokens, std::int64_t top_k) {
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    require(tokens[r] <= std::numeric_limits<std::int32_t>::max() / top_k,
            "rank {} would receive {} tokens with {} picks each, more than 2^31 picks", r,
            tokens[r], top_k);
  }
}

// Returns the arguments of lay_out. The counts [ranks, E] and everything computed from them are in
// the same memory as the groups.
LayOut layout_of(const ConstTensorView& counts, const PlacementTables& placement,
                 const PlanData& data, const GroupTables& groups, const TensorView& layout) {
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

// Counts this rank's assignments that have room at another rank. The groups are in host memory.
std::int64_t count_remote(const PlanData& data, const GroupTables& groups) {
  const auto sources = groups.source_offsets.span<std::int32_t>();
  const auto before = groups.rows_before.span<std::int32_t>();
  const auto kept = groups.kept_rows.span<std::int32_t>();
  const auto owners = data.placement->owners();
  std::int64_t total = 0;
  for (std::size_t e = 0; e < kept.size(); ++e) {
    if (owners[e] == data.rank) continue;
    total += std::min(sources[e + 1] - sources[e], kept[e] - before[e]);
  }
  return total;
}

// Counts the same assignments for a plan in which all of them have room.
std::int64_t count_remote(const PlanSummary& known, const ExpertPlacement& placement, int rank) {
  const auto owners = placement.owners();
  const auto own = std::span(known.counts).subspan(static_cast<std::size_t>(rank) * owners.size());
  std::int64_t total = 0;
  for (std::size_t e = 0; e < owners.size(); ++e) total += owners[e] == rank ? 0 : own[e];
  return total;
}

// Returns the arguments of assign_slots, without the ids. Takes row_sources if they are this
// rank's.
AssignSlots slots_of(const TensorView& owners, const Counted& counted, PlanData& data) {
  AssignSlots args{.owners = owners,
                   .expert_offsets = data.groups.expert_offsets,
                   .rows_before = data.groups.rows_before,
                   .kept_rows = data.groups.kept_rows,
                   .source_offsets = data.groups.source_offsets,
                   .positions = flat(counted.positions),
                   .slots = flat(data.slots),
                   .target_ranks = flat(data.target_ranks),
                   .sources = data.sources};
  if (data.placement->num_ranks() == 1) {
    data.row_sources = backend_of(data.device).take({data.row_capacity()}, Dtype::i32);
    args.row_sources = data.row_sources;
  }
  if (counted.token_positions) {
    args.sent = {.positions = flat(*counted.token_positions),
                 .offsets = data.groups.token_offsets,
                 .places = flat(data.places),
                 .sources = flat(data.sent_sources)};
  }
  return args;
}

}  // namespace

std::optional<std::int64_t> first_sentinel(std::int64_t num_experts, SentinelIds sentinels) {
  if (sentinels == SentinelIds::allow) return num_experts;
  return {};
}

ConstTensorView narrowed_ids(const Device& device, const ConstTensorView& expert_ids,
                             std::int64_t num_experts, SentinelIds sentinels) {
  const auto first = first_sentinel(num_experts, sentinels);
  if (expert_ids.dtype() == Dtype::i32 && !first) return expert_ids;
  const TensorView narrow = backend_of(device).take(expert_ids.shape(), Dtype::i32);
  backend_of(device).narrow_ids({.from = expert_ids, .first_sentinel = first, .to = narrow});
  return narrow;
}

PlanMaker::PlanMaker(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
                     Device device, Exchange exchange)
    : comm_(comm),
      placement_(std::make_shared<const ExpertPlacement>(std::move(placement))),
      options_(options),
      device_(std::move(device)),
      host_(device_.memory() == Memory::host ? device_ : Device()),
      id_(ObjectIds::next(comm)) {
  require_same_options(comm, *placement_, options, id_);
  device_tables_ = PlacementTables::make(backend_of(device_), *placement_);
  if (exchange == Exchange::peer_memory) {
    meetings_ =
        std::make_shared<PeerMeetings>(PeerMemory::of(comm, device_), record_words(*placement_));
    words_without_picks_ = words_without_picks(*placement_, comm.rank());
  }
}

void PlanMaker::resize(const Sizing& sizing) {
  if (sizing.is_bounded()) require_valid_capacity(sizing.capacity(), options_.alignment);
  require(sizing.token_capacity() >= 0, "token_capacity ({}) must not be negative",
          sizing.token_capacity());
  options_.sizing = sizing;
}

PlanProblems PlanMaker::problems_of(const Routing& routing) const {
  const ConstTensorView words = routing.problems;
  if (!is_given(words)) return problems_of(routing.first_non_finite_token);
  check_arguments({&comm_}, "plan", [&] {
    require(words.dtype() == Dtype::i64 && words.shape() == Shape{kProblemWords},
            "problems is {} {}, but must be contiguous i64 [{}]", name_of(words.dtype()),
            words.shape(), std::int64_t{kProblemWords});
    require_memory(words, device_.memory(), "problems");
  });
  return {.of_router = {.words = words}};
}

void take_tables(PlanData& data, PlanTables kind, const TakeTable& take) {
  data.report = PlanReport::take(take, *data.placement);
  if (kind != PlanTables::own) data.reports = PeerReports::take(take, *data.placement);
  data.groups = GroupTables::take(take, *data.placement, data.rank);
  const Shape picks{data.num_tokens, data.top_k};
  data.slots = take(picks, Dtype::i32);
  data.target_ranks = take(picks, Dtype::i32);
  data.sources = take({picks.num_elements()}, Dtype::i32);
  if (kind != PlanTables::crossing_once) return;
  data.places = take(picks, Dtype::i32);
  data.sent_sources = take(picks, Dtype::i32);
}

std::int64_t words_without_picks(const ExpertPlacement& placement, int rank) {
  std::int64_t words = 0;
  PlanData data{.placement = std::make_shared<const ExpertPlacement>(placement),
                .options = {},
                .device = {},
                .host = {},
                .rank = rank};
  take_tables(data, PlanTables::crossing_once, [&](const Shape& shape, Dtype dtype) -> TensorView {
    words += TablePieces::padded(shape.num_elements() * size_of(dtype) / size_of(Dtype::i32));
    return Tensor(shape, dtype).view();
  });
  return words;
}

std::int64_t words_of_plan(std::int64_t without_picks, std::int64_t num_tokens,
                           std::int64_t top_k) {
  require(top_k == 0 || num_tokens <= std::numeric_limits<std::int32_t>::max() / top_k,
          "{} tokens with {} picks each are more than 2^31 picks", num_tokens, top_k);
  constexpr std::int64_t kPickTables = 5;  // those with one entry per pick
  return without_picks + kPickTables * TablePieces::padded(num_tokens * top_k);
}

PlanTables PlanMaker::tables() const {
  if (meetings_ == nullptr) return PlanTables::own;
  return crosses_once() ? PlanTables::crossing_once : PlanTables::of_all_ranks;
}

void PlanMaker::require_words(const TensorView& memory, std::int64_t num_tokens,
                              std::int64_t top_k) const {
  require<Unsupported>(
      crosses_once(),
      "a plan in a tensor needs the peer mover and an overflow policy other than drop");
  const Shape expected{words_of_plan(words_without_picks_, num_tokens, top_k)};
  require(memory.dtype() == Dtype::i32 && memory.shape() == expected,
          "the plan's tensor is {} {}, but must be i32 {} for {} tokens with {} picks each",
          name_of(memory.dtype()), memory.shape(), expected, num_tokens, top_k);
  require_memory(memory, device_.memory(), "the plan's tensor");
  require(reinterpret_cast<std::uintptr_t>(memory.data()) % 16 == 0,
          "the plan's tensor must be aligned to 16 bytes");
}

void PlanMaker::plan_into(const ConstTensorView& expert_ids, const PlanProblems& problems,
                          const TensorView& memory) {
  check_arguments({&comm_}, "plan", [&] {
    const RecordHeader header = header_of(expert_ids);
    require_valid_form(header, comm_.rank());
    require_words(memory, header.num_tokens, header.top_k);
  });
  TablePieces pieces(memory);
  plan(
      expert_ids, problems,
      [&](const Shape& shape, Dtype dtype) { return pieces.take(shape, dtype); }, Fetch::nothing);
}

std::shared_ptr<PlanData> PlanMaker::plan_in(const TensorView& memory, const PlanForm& form) const {
  require_words(memory, form.num_tokens, form.top_k);
  PlanOptions options = options_;
  options.hidden = form.hidden;
  options.dtype = form.dtype;
  options.sizing = Sizing::bounded(form.num_rows, Overflow::fail, form.num_received);
  const std::array<std::int64_t, 3> alike{form.hidden, static_cast<std::int64_t>(form.dtype),
                                          form.top_k};
  auto data = std::make_shared<PlanData>(
      PlanData{.placement = placement_,
               .options = options,
               .device = device_,
               .host = host_,
               .rank = comm_.rank(),
               .plan_number = hash_of(std::span<const std::int64_t>(alike)),
               .num_tokens = form.num_tokens,
               .top_k = form.top_k,
               .check = meetings_->memory_check(),
               .is_known = false});
  TablePieces pieces(memory);
  take_tables(*data, PlanTables::crossing_once,
              [&](const Shape& shape, Dtype dtype) { return pieces.take(shape, dtype); });
  return data;
}

PlanForm PlanMaker::complete(const TensorView& memory, const PlanForm& form) const {
  const auto data = plan_in(memory, form);
  const PlanSummary& known = data->summary();
  require_sound_routing(known.status);
  require_nameable_rows(known, *placement_, Sizing::exact());
  require_nameable_sources(known.status.needed_tokens, data->top_k);
  PlanForm complete = form;
  complete.num_rows = known.num_rows;
  complete.num_received = known.num_tokens;
  return complete;
}

std::shared_ptr<PlanData> PlanMaker::plan(const ConstTensorView& given_ids,
                                          const PlanProblems& problems, const TakeTable& take,
                                          Fetch fetch) {
  auto data = std::make_shared<PlanData>(PlanData{.placement = placement_,
                                                  .options = options_,
                                                  .device = device_,
                                                  .host = host_,
                                                  .rank = comm_.rank(),
                                                  .plan_number = num_plans_});
  const RecordHeader header = header_of(given_ids);
  if (meetings_ != nullptr) {
    meetings_->check();
    check_arguments({&comm_}, "plan", [&] {
      require_valid_form(header, comm_.rank());
      const std::array<std::int64_t, 1> tokens{header.token_capacity};
      if (crosses_once()) require_nameable_sources(tokens, header.top_k);
    });
  }
  if (has_valid_form(header)) {
    data->num_tokens = header.num_tokens;
    data->top_k = header.top_k;
  }
  take_tables(*data, tables(), take);
  if (tables() == PlanTables::own && comm_.size() == 1 && options_.sizing.is_bounded()) {
    plan_at_once(given_ids, header, problems, *data);
    return data;
  }
  ConstTensorView expert_ids;
  Counted counted;
  if (has_valid_form(header)) {
    expert_ids = narrowed_ids(device_, given_ids, placement_->num_experts(), options_.sentinel_ids);
    counted = count(expert_ids, problems, *data);
  }
  if (comm_.size() == 1) {
    plan_alone(header, problems, *data);
  } else if (meetings_ != nullptr) {
    plan_in_peer_memory(header, problems, *data, fetch);
  } else {
    plan_together(header, *data);
  }
  AssignSlots slots = slots_of(device_tables_.owners, counted, *data);
  slots.expert_ids = expert_ids;
  backend_of(device_).assign_slots(slots);
  return data;
}

RecordHeader PlanMaker::header_of(const ConstTensorView& expert_ids) const {
  const Sizing& sizing = options_.sizing;
  return {.planner_id = id_,
          .top_k = expert_ids.shape().rank() == 2 ? expert_ids.shape()[1] : 0,
          .capacity = sizing.is_bounded() ? sizing.capacity() : -1,
          .token_capacity = sizing.is_bounded() ? sizing.token_capacity() : -1,
          .overflow = static_cast<std::int64_t>(sizing.overflow()),
          .plan_number = num_plans_,
          .ids_dtype = static_cast<std::int64_t>(expert_ids.dtype()),
          .ids_dims = expert_ids.shape().rank(),
          .ids_memory = static_cast<std::int64_t>(expert_ids.memory()),
          .device_memory = static_cast<std::int64_t>(device_.memory()),
          .num_tokens = expert_ids.rows()};
}

// With Overflow::drop rows go straight to their slots, because what is dropped depends on the
// counts of all ranks.
bool PlanMaker::crosses_once() const {
  const bool drops = options_.sizing.is_bounded() && options_.sizing.overflow() == Overflow::drop;
  return meetings_ != nullptr && !drops;
}

CountAssignments PlanMaker::counting(const Counted& counted, const PlanData& data) const {
  CountAssignments args{.owners = device_tables_.owners,
                        .allow_duplicates = options_.duplicate_ids == DuplicateIds::allow,
                        .counts = flat(data.report.counts),
                        .distinct_tokens = data.report.distinct_tokens,
                        .positions = flat(counted.positions),
                        .problems = data.report.problems};
  if (counted.token_positions) args.token_positions = flat(*counted.token_positions);
  return args;
}

Counted PlanMaker::count(const ConstTensorView& expert_ids, const PlanProblems& problems,
                         PlanData& data) const {
  const DeviceBackend& device = backend_of(device_);
  Counted counted{.positions = data.slots};
  if (crosses_once()) {
    counted.positions = device.take(expert_ids.shape(), Dtype::i32);
    counted.token_positions = device.take(expert_ids.shape(), Dtype::i32);
  }
  device.set_problems(problems.of_router, data.report.problems);
  CountAssignments args = counting(counted, data);
  args.expert_ids = expert_ids;
  device.count_assignments(args);
  return counted;
}

// The layout of this rank's own counts.
LayOut PlanMaker::layout_alone(const PlanProblems& problems, const PlanData& data) const {
  LayOut args =
      layout_of(data.report.counts, device_tables_, data, data.groups, data.report.layout);
  args.problems = one_row(data.report.problems);
  args.step = problems.step;
  return args;
}

// The steps of a bounded plan need nothing from the host, so the device may make it at once.
void PlanMaker::plan_at_once(const ConstTensorView& expert_ids, const RecordHeader& header,
                             const PlanProblems& problems, PlanData& data) {
  require_same_call({.headers = {header}});
  ++num_plans_;
  const Counted counted{.positions = data.slots};
  backend_of(device_).plan_alone(
      {.expert_ids = expert_ids,
       .first_sentinel = first_sentinel(placement_->num_experts(), options_.sentinel_ids),
       .problems = problems.of_router,
       .count = counting(counted, data),
       .layout = layout_alone(problems, data),
       .slots = slots_of(device_tables_.owners, counted, data)});
  learn_alone(data);
}

void PlanMaker::plan_alone(const RecordHeader& header, const PlanProblems& problems,
                           PlanData& data) {
  require_same_call({.headers = {header}});
  ++num_plans_;
  backend_of(device_).lay_out(layout_alone(problems, data));
  learn_alone(data);
}

// A bounded plan on a GPU does not wait.
void PlanMaker::learn_alone(PlanData& data) {
  data.is_known = device_.memory() == Memory::host || !options_.sizing.is_bounded();
  if (!data.is_known) return;
  const auto report = data.report.on_host(backend_of(device_), backend_of(host_), *placement_);
  data.known.fill(record_of(report), report.layout, options_.sizing, data.rank);
  require_possible(data);
}

// Ranks exchange their records through the communicator, and each lays out all groups on its CPU.
void PlanMaker::plan_together(RecordHeader header, PlanData& data) {
  const PlanReport& own = data.report;
  if (has_valid_form(header)) {
    add_problems(header, own.problems);
  } else {  // require_same_call throws on all ranks
    zero_rows(own.all);
  }
  const PlanRecords records = exchange_records(comm_, header, own.counts.span<std::int32_t>(),
                                               own.distinct_tokens.span<std::int32_t>());
  require_same_call(records);
  ++num_plans_;
  const ConstTensorView counts(records.counts.data(), {comm_.size(), placement_->num_experts()});
  backend_of(device_).lay_out(layout_of(counts, device_tables_, data, data.groups, own.layout));
  data.known.fill(records, own.layout, options_.sizing, data.rank);
  data.known.num_remote = count_remote(data, data.groups);
  require_possible(data);
}

// Devices exchange their counts in peer memory, and each lays out all groups.
void PlanMaker::plan_in_peer_memory(const RecordHeader& header, const PlanProblems& problems,
                                    PlanData& data, Fetch fetch) {
  const DeviceBackend& device = backend_of(device_);
  const PeerReports& reports = *data.reports;
  std::array<std::int64_t, kHeaderWords> words{};
  std::memcpy(words.data(), &header, sizeof(header));
  ++num_plans_;
  meetings_->gather(Meeting::plan, words, data.report.record(), reports.gathered);
  LayOut args = layout_of(reports.counts, device_tables_, data, data.groups, reports.layout);
  args.must_agree = columns(reports.headers, kAlikeWords);
  args.problems = reports.problems;
  args.step = problems.step;
  if (crosses_once()) {
    args.distinct_tokens = reports.distinct_tokens;
    args.token_offsets = data.groups.token_offsets;
  }
  device.lay_out(args);
  data.check = meetings_->memory_check();
  data.is_known = fetch != Fetch::nothing &&
                  (device_.memory() == Memory::host || !options_.sizing.is_bounded());
  if (!data.is_known) return;
  const PeerReports fetched = reports.on_host(device, backend_of(host_), *placement_);
  const PlanRecords records = records_of(fetched);
  if (!have_met(records)) meetings_->check();
  require_same_call(records);
  data.known.fill(records, fetched.layout, options_.sizing, data.rank);
  data.known.num_remote = device_.memory() == Memory::host
                              ? count_remote(data, data.groups)
                              : count_remote(data.known, *placement_, data.rank);
  require_possible(data);
  if (crosses_once()) require_nameable_sources(data.known.status.needed_tokens, data.top_k);
}

void PlanMaker::require_possible(const PlanData& data) const {
  if (!options_.sizing.is_bounded()) require_sound_routing(data.known.status);
  require_nameable_rows(data.known, *placement_, options_.sizing);
}

Planner::Planner(Communicator& comm, ExpertPlacement placement, const PlanOptions& options,
                 Device device) {
  const bool uses_peers = comm.size() > 1 && device.memory() == Memory::gpu;
  or_abort_alone({&comm}, "Planner", [&] {
    maker_ = std::make_unique<PlanMaker>(comm, std::move(placement), options, std::move(device),
                                         uses_peers ? Exchange::peer_memory : Exchange::host);
  });
}

Planner::~Planner() = default;
Planner::Planner(Planner&&) noexcept = default;

Plan Planner::plan(const ConstTensorView& expert_ids, std::int64_t first_non_finite_token) {
  PlanMaker& maker = held(maker_, "planner");
  return or_abort_alone({&maker.comm()}, "plan", [&] {
    return plan_of(maker.plan(expert_ids, maker.problems_of(first_non_finite_token)));
  });
}
Plan Planner::plan(const Routing& routing) {
  PlanMaker& maker = held(maker_, "planner");
  return or_abort_alone({&maker.comm()}, "plan", [&] {
    return plan_of(maker.plan(routing.expert_ids, maker.problems_of(routing)));
  });
}
void Planner::resize(const Sizing& sizing) { held(maker_, "planner").resize(sizing); }

}  // namespace switchyard
