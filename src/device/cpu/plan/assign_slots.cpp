// SPDX-License-Identifier: Apache-2.0
// Assigns slots in one pass over the ids, O(T·K + E).
#include <optional>
#include <span>
#include <vector>

#include "device/cpu/kernels.h"
#include "device/cpu/plan/fetch_ahead.h"

namespace switchyard::cpu {
namespace {

// The values from which the slots of an expert's assignments are computed.
struct SlotBase {
  std::int32_t first_slot = 0;  // the slot of this rank's first assignment
  std::int32_t end_slot = 0;    // slots from here on do not fit
  std::int32_t first_source = 0;
  std::int32_t owner = 0;
};

std::vector<SlotBase> slot_bases(const AssignSlots& args) {
  const auto owners = args.owners.span<std::int32_t>();
  const auto offsets = args.expert_offsets.span<std::int32_t>();
  const auto rows_before = args.rows_before.span<std::int32_t>();
  const auto kept_rows = args.kept_rows.span<std::int32_t>();
  const auto source_offsets = args.source_offsets.span<std::int32_t>();
  std::vector<SlotBase> bases(owners.size());
  for (std::size_t e = 0; e < bases.size(); ++e) {
    bases[e] = {offsets[e] + rows_before[e], offsets[e] + kept_rows[e], source_offsets[e],
                owners[e]};
  }
  return bases;
}

// Fills the tables of the tokens that this rank sends to the owners of its assignments.
class SentTable {
 public:
  explicit SentTable(const SentTokens& sent)
      : positions_(sent.positions.span<std::int32_t>()),
        offsets_(sent.offsets.span<std::int32_t>()),
        places_(sent.places.span<std::int32_t>()),
        sources_(sent.sources.span<std::int32_t>()) {}

  // Fills the entries of one token, from its first assignment on. Its slots and targets are known.
  void fill(std::size_t first, std::span<const std::int32_t> slots,
            std::span<const std::int32_t> targets) const {
    const auto top_k = static_cast<std::int32_t>(slots.size());
    for (std::size_t k = 0; k < slots.size(); ++k) {
      places_[first + k] = -1;
      sources_[first + k] = -1;
      if (slots[k] < 0) continue;
      const auto place = offsets_[static_cast<std::size_t>(targets[k])] + positions_[first + k];
      sources_[first + k] = place * top_k + static_cast<std::int32_t>(k);
      bool is_sent = false;
      for (std::size_t j = 0; j < k; ++j) is_sent |= slots[j] >= 0 && targets[j] == targets[k];
      if (!is_sent) places_[first + k] = place;
    }
  }

 private:
  std::span<const std::int32_t> positions_;
  std::span<const std::int32_t> offsets_;
  std::span<std::int32_t> places_;
  std::span<std::int32_t> sources_;
};

}  // namespace

void assign_slots(const AssignSlots& args) {
  const auto num_tokens = args.expert_ids.rows();
  const auto top_k = args.expert_ids.shape()[1];
  fetch_ahead(args.target_ranks);
  fetch_ahead(args.sources);
  if (args.row_sources) fetch_ahead(*args.row_sources);
  const auto bases = slot_bases(args);
  const auto* ids = reinterpret_cast<const std::int32_t*>(args.expert_ids.data());
  const std::int32_t* const positions = args.positions.span<std::int32_t>().data();
  std::int32_t* const slots = args.slots.span<std::int32_t>().data();
  std::int32_t* const targets = args.target_ranks.span<std::int32_t>().data();
  std::int32_t* const sources = args.sources.span<std::int32_t>().data();
  std::int32_t* const row_sources =
      args.row_sources ? args.row_sources->span<std::int32_t>().data() : nullptr;
  std::optional<SentTable> sent;
  if (args.sent) sent.emplace(*args.sent);
  std::int32_t assignment = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t, ids += args.expert_ids.row_stride()) {
    for (std::int64_t k = 0; k < top_k; ++k, ++assignment) {
      const std::int32_t position = positions[assignment];
      if (position < 0) [[unlikely]] {
        slots[assignment] = -1;
        targets[assignment] = -1;
        continue;
      }
      const SlotBase& base = bases[static_cast<std::size_t>(ids[k])];
      const std::int64_t slot = std::int64_t{base.first_slot} + position;
      const bool has_room = slot < base.end_slot;
      slots[assignment] = has_room ? static_cast<std::int32_t>(slot) : -1;
      if (has_room && row_sources != nullptr) row_sources[slot] = assignment;
      targets[assignment] = base.owner;
      sources[base.first_source + position] = assignment;
    }
    if (!sent) continue;
    const auto width = static_cast<std::size_t>(top_k);
    const std::size_t first = static_cast<std::size_t>(assignment) - width;
    sent->fill(first, {slots + first, width}, {targets + first, width});
  }
}

}  // namespace switchyard::cpu
