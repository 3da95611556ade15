// Slots the assignments of a plan that is laid out.
#include <cuda_runtime.h>

#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"

namespace switchyard::cuda {
namespace {

struct Slots {
  Assignments all;
  const std::int32_t* owners = nullptr;
  const std::int32_t* expert_offsets = nullptr;
  const std::int32_t* rows_before = nullptr;
  const std::int32_t* kept_rows = nullptr;
  const std::int32_t* source_offsets = nullptr;
  std::int32_t* slots = nullptr;
  std::int32_t* target_ranks = nullptr;
  std::int32_t* sources = nullptr;
  std::int32_t* row_sources = nullptr;  // or none
};

__global__ void fill_slots(const Slots s) {
  for (unsigned i = first_element(); i < s.all.count(); i += element_stride()) {
    const std::int32_t position = s.slots[i];
    if (position < 0) {
      s.target_ranks[i] = -1;
      continue;
    }
    const std::int32_t e = s.all.id(i);
    const std::int64_t row = std::int64_t{s.rows_before[e]} + position;
    const bool has_room = row < s.kept_rows[e];
    const std::int32_t slot = has_room ? s.expert_offsets[e] + static_cast<std::int32_t>(row) : -1;
    s.slots[i] = slot;
    if (has_room && s.row_sources != nullptr) s.row_sources[slot] = static_cast<std::int32_t>(i);
    s.target_ranks[i] = s.owners[e];
    s.sources[s.source_offsets[e] + position] = static_cast<std::int32_t>(i);
  }
}

}  // namespace

void assign_slots(const AssignSlots& args, Context& context) {
  const Slots s{
      .all = assignments_of(args.expert_ids),
      .owners = elements<std::int32_t>(args.owners),
      .expert_offsets = elements<std::int32_t>(args.expert_offsets),
      .rows_before = elements<std::int32_t>(args.rows_before),
      .kept_rows = elements<std::int32_t>(args.kept_rows),
      .source_offsets = elements<std::int32_t>(args.source_offsets),
      .slots = elements<std::int32_t>(args.slots),
      .target_ranks = elements<std::int32_t>(args.target_ranks),
      .sources = elements<std::int32_t>(args.sources),
      .row_sources = args.row_sources ? elements<std::int32_t>(*args.row_sources) : nullptr};
  if (s.all.count() == 0) return;
  fill_slots<<<blocks_over(s.all.count(), context.num_multiprocessors()), kElementThreads, 0,
               context.stream()>>>(s);
  check(cudaGetLastError(), "fill_slots");
}

}  // namespace switchyard::cuda
