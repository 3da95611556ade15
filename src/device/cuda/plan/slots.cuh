// SPDX-License-Identifier: Apache-2.0
// The slot of every assignment, once the plan is laid out.
#pragma once

#include <cstdint>

#include "device/cuda/plan/assignments.cuh"
#include "device/device_backend.h"

namespace switchyard::cuda {

struct Slots {
  Assignments all;
  const std::int32_t* owners = nullptr;
  const std::int32_t* expert_offsets = nullptr;
  const std::int32_t* rows_before = nullptr;
  const std::int32_t* kept_rows = nullptr;
  const std::int32_t* source_offsets = nullptr;
  const std::int32_t* positions = nullptr;
  std::int32_t* slots = nullptr;
  std::int32_t* target_ranks = nullptr;
  std::int32_t* sources = nullptr;
  std::int32_t* row_sources = nullptr;  // or null
  // Only set if each token crosses to a rank once (AssignSlots::sent); otherwise null.
  const std::int32_t* token_positions = nullptr;
  const std::int32_t* token_offsets = nullptr;
  std::int32_t* places = nullptr;
  std::int32_t* sent_sources = nullptr;

  // Returns the index of an assignment among the rows of its expert. It must have a position.
  __device__ std::int64_t row(unsigned i, std::int32_t e) const {
    return std::int64_t{rows_before[e]} + positions[i];
  }
};

// True if an earlier pick of the same token has room at the same rank.
__device__ inline bool is_sent_before(const Slots& s, unsigned i, std::int32_t rank) {
  for (unsigned j = i - i % s.all.top_k; j < i; ++j) {
    if (s.positions[j] < 0) continue;
    const std::int32_t e = s.all.id(j);
    if (s.owners[e] == rank && s.row(j, e) < s.kept_rows[e]) return true;
  }
  return false;
}

__device__ inline void fill_sent(const Slots& s, unsigned i, std::int32_t rank, bool has_room) {
  std::int32_t place = -1;
  std::int32_t source = -1;
  if (has_room) {
    const std::int32_t d = s.token_offsets[rank] + s.token_positions[i];
    source =
        d * static_cast<std::int32_t>(s.all.top_k) + static_cast<std::int32_t>(i % s.all.top_k);
    if (!is_sent_before(s, i, rank)) place = d;
  }
  s.places[i] = place;
  s.sent_sources[i] = source;
}

// Gives every assignment its slot. Called by all threads of the grid.
__device__ inline void fill_slots(const Slots& s) {
  for (unsigned i = first_element(); i < s.all.count(); i += element_stride()) {
    const std::int32_t position = s.positions[i];
    if (position < 0) {
      s.slots[i] = -1;
      s.target_ranks[i] = -1;
      if (s.places != nullptr) fill_sent(s, i, -1, false);
      continue;
    }
    const std::int32_t e = s.all.id(i);
    const std::int64_t row = s.row(i, e);
    const bool has_room = row < s.kept_rows[e];
    const std::int32_t slot = has_room ? s.expert_offsets[e] + static_cast<std::int32_t>(row) : -1;
    s.slots[i] = slot;
    if (has_room && s.row_sources != nullptr) s.row_sources[slot] = static_cast<std::int32_t>(i);
    s.target_ranks[i] = s.owners[e];
    if (s.places != nullptr) fill_sent(s, i, s.owners[e], has_room);
    s.sources[s.source_offsets[e] + position] = static_cast<std::int32_t>(i);
  }
}

inline Slots slots_of(const AssignSlots& args) {
  Slots s{.all = assignments_of(args.expert_ids),
          .owners = elements<std::int32_t>(args.owners),
          .expert_offsets = elements<std::int32_t>(args.expert_offsets),
          .rows_before = elements<std::int32_t>(args.rows_before),
          .kept_rows = elements<std::int32_t>(args.kept_rows),
          .source_offsets = elements<std::int32_t>(args.source_offsets),
          .positions = elements<std::int32_t>(args.positions),
          .slots = elements<std::int32_t>(args.slots),
          .target_ranks = elements<std::int32_t>(args.target_ranks),
          .sources = elements<std::int32_t>(args.sources),
          .row_sources = args.row_sources ? elements<std::int32_t>(*args.row_sources) : nullptr};
  if (args.sent) {
    s.token_positions = elements<std::int32_t>(args.sent->positions);
    s.token_offsets = elements<std::int32_t>(args.sent->offsets);
    s.places = elements<std::int32_t>(args.sent->places);
    s.sent_sources = elements<std::int32_t>(args.sent->sources);
  }
  return s;
}

}  // namespace switchyard::cuda
