// SPDX-License-Identifier: Apache-2.0
// Allocates the tables of a plan: those of one struct share one piece of memory.
#include "moe/plan/plan_tables.h"

#include <algorithm>
#include <vector>

#include "core/row_bytes.h"

namespace switchyard {
namespace {

constexpr std::int64_t kPieceBytes = 128;  // every table starts at a multiple of it

struct Piece {
  Shape shape;
  Dtype dtype = Dtype::i32;
};

std::int64_t padded_bytes(const Piece& piece) {
  const auto bytes = piece.shape.num_elements() * size_of(piece.dtype);
  return (bytes + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
}

// Takes the pieces together. Returns a view of all the memory, then one view per piece.
std::vector<TensorView> take_together(const TakeTable& take, std::initializer_list<Piece> pieces) {
  std::int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += padded_bytes(piece);
  std::vector<TensorView> views{take({bytes / size_of(Dtype::i64)}, Dtype::i64)};
  std::byte* next = views[0].data();
  for (const Piece& piece : pieces) {
    views.emplace_back(next, piece.dtype, piece.shape, piece.shape.row_elements(), views[0].owner(),
                       views[0].memory());
    next += padded_bytes(piece);
  }
  return views;
}

}  // namespace

PlacementTables PlacementTables::make(const DeviceBackend& device,
                                      const ExpertPlacement& placement) {
  std::vector<std::int32_t> by_rank;
  std::vector<std::int32_t> offsets{0};
  for (int r = 0; r < placement.num_ranks(); ++r) {
    std::ranges::copy(placement.experts_of(r), std::back_inserter(by_rank));
    offsets.push_back(static_cast<std::int32_t>(by_rank.size()));
  }
  const Shape experts{placement.num_experts()};
  const auto views = take_together(
      memory_of(device), {{experts}, {experts}, {{placement.num_ranks() + std::int64_t{1}}}});
  device.upload(std::as_bytes(placement.owners()), views[1]);
  device.upload(std::as_bytes(std::span(by_rank)), views[2]);
  device.upload(std::as_bytes(std::span(offsets)), views[3]);
  return {views[0], views[1], views[2], views[3]};
}

PlanReport PlanReport::take(const TakeTable& take, const ExpertPlacement& placement) {
  const std::int64_t ranks = placement.num_ranks();
  const auto views = take_together(take, {{{kProblemWords}, Dtype::i64},
                                          {{1, placement.num_experts()}},
                                          {{ranks}},
                                          {{layout_words(ranks)}, Dtype::i64}});
  return {views[0], views[1], views[2], views[3], views[4]};
}

TensorView PlanReport::record() const {
  return all.slice(0, (layout.data() - all.data()) / size_of(Dtype::i64));
}

PeerReports PeerReports::take(const TakeTable& take, const ExpertPlacement& placement) {
  const std::int64_t ranks = placement.num_ranks();
  const std::int64_t experts = placement.num_experts();
  const std::int64_t words = kHeaderWords + record_words(placement);
  const auto views =
      take_together(take, {{{ranks, words}, Dtype::i64}, {{layout_words(ranks)}, Dtype::i64}});
  const TensorView& gathered = views[1];
  std::byte* next = gathered.data();
  const auto columns = [&](Dtype dtype, std::int64_t count, std::int64_t bytes) {
    TensorView view(next, dtype, {ranks, count}, words * (8 / size_of(dtype)), gathered.owner(),
                    gathered.memory());
    next += bytes;
    return view;
  };
  PeerReports reports;
  reports.all = views[0];
  reports.gathered = gathered;
  reports.layout = views[2];
  reports.headers = columns(Dtype::i64, kHeaderWords, kHeaderWords * 8);
  reports.problems =
      columns(Dtype::i64, kProblemWords, padded_bytes({{kProblemWords}, Dtype::i64}));
  reports.counts = columns(Dtype::i32, experts, padded_bytes({{experts}}));
  reports.distinct_tokens = columns(Dtype::i32, ranks, padded_bytes({{ranks}}));
  return reports;
}

std::int64_t record_words(const ExpertPlacement& placement) {
  return (padded_bytes({{kProblemWords}, Dtype::i64}) + padded_bytes({{placement.num_experts()}}) +
          padded_bytes({{placement.num_ranks()}})) /
         size_of(Dtype::i64);
}

PeerReports PeerReports::on_host(const DeviceBackend& device, const DeviceBackend& host,
                                 const ExpertPlacement& placement) const {
  if (all.memory() == Memory::host) return *this;
  PeerReports copy = take(memory_of(host), placement);
  device.fetch(all, bytes_of(copy.all));
  return copy;
}

PlanReport PlanReport::on_host(const DeviceBackend& device, const DeviceBackend& host,
                               const ExpertPlacement& placement) const {
  if (all.memory() == Memory::host) return *this;
  PlanReport copy = take(memory_of(host), placement);
  device.fetch(all, bytes_of(copy.all));
  return copy;
}

GroupTables GroupTables::take(const TakeTable& take, const ExpertPlacement& placement, int rank) {
  const Shape experts{placement.num_experts()};
  const auto local = static_cast<std::int64_t>(placement.experts_of(rank).size());
  const auto views = take_together(take, {{experts},
                                          {experts},
                                          {experts},
                                          {{placement.num_experts() + std::int64_t{1}}},
                                          {{local + 1}},
                                          {{local}},
                                          {{placement.num_ranks()}}});
  return {views[0], views[1], views[2], views[3], views[4], views[5], views[6], views[7]};
}

}  // namespace switchyard
