// SPDX-License-Identifier: Apache-2.0
// The small tables of a plan. Tables that are copied between host and device together share one
// piece of memory.
#pragma once

#include <functional>

#include "device/device_backend.h"
#include "moe/plan/plan_record.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard {

// Returns a contiguous table as a 1-D view.
inline TensorView flat(const TensorView& contiguous) {
  return {contiguous.data(),  contiguous.dtype(), {contiguous.shape().num_elements()}, 1,
          contiguous.owner(), contiguous.memory()};
}

// Allocates a table from the device's memory or from the caller's tensor.
using TakeTable = std::function<TensorView(const Shape& shape, Dtype dtype)>;
inline TakeTable memory_of(const DeviceBackend& device) {
  return [&device](const Shape& shape, Dtype dtype) { return device.take(shape, dtype); };
}

// Carves one table after the other out of an i32 tensor.
class TablePieces {
 public:
  explicit TablePieces(const TensorView& memory) : memory_(memory) {}

  TensorView take(const Shape& shape, Dtype dtype = Dtype::i32) {
    std::byte* const data = memory_.data() + 4 * words_;
    words_ += padded(shape.num_elements() * size_of(dtype) / 4);
    return {data, dtype, shape, shape.row_elements(), memory_.owner(), memory_.memory()};
  }
  std::int64_t words() const { return words_; }

  // Rounds up so that every table starts at a multiple of 16 bytes if the first one does.
  static std::int64_t padded(std::int64_t words) { return (words + 3) / 4 * 4; }

 private:
  TensorView memory_;
  std::int64_t words_ = 0;
};

// A placement in the form that devices read.
struct PlacementTables {
  TensorView all;
  TensorView owners;           // [E] i32
  TensorView experts_by_rank;  // [E] i32
  TensorView rank_offsets;     // [ranks + 1] i32

  static PlacementTables make(const DeviceBackend& device, const ExpertPlacement& placement);
};

// One rank's report on its own assignments. With a single rank, no other reports are needed.
struct PlanReport {
  TensorView all;
  TensorView problems;         // [kProblemWords] i64
  TensorView counts;           // [1, E] i32
  TensorView distinct_tokens;  // [ranks] i32
  TensorView layout;           // [layout_words(ranks)] i64

  // [m] i64: everything but the layout. This is the part that other ranks receive.
  TensorView record() const;

  static PlanReport take(const TakeTable& take, const ExpertPlacement& placement);
  // Returns the report in the memory of `host`: itself if it is there, otherwise a copy, for which
  // it waits.
  PlanReport on_host(const DeviceBackend& device, const DeviceBackend& host,
                     const ExpertPlacement& placement) const;
};

// Returns the number of i64 words in PlanReport::record().
std::int64_t record_words(const ExpertPlacement& placement);

// The reports of all ranks, each after a header, as ranks exchange them in peer memory, and the
// layout that follows from them.
struct PeerReports {
  TensorView all;
  TensorView gathered;         // [ranks, kHeaderWords + m] i64
  TensorView layout;           // [layout_words(ranks)] i64
  TensorView headers;          // [ranks, kHeaderWords] i64; strided, like the next three
  TensorView problems;         // [ranks, kProblemWords] i64
  TensorView counts;           // [ranks, E] i32
  TensorView distinct_tokens;  // [ranks, ranks] i32

  static PeerReports take(const TakeTable& take, const ExpertPlacement& placement);
  // Like PlanReport::on_host.
  PeerReports on_host(const DeviceBackend& device, const DeviceBackend& host,
                      const ExpertPlacement& placement) const;
};

// The layout of the groups, as lay_out writes it. All tables are i32.
struct GroupTables {
  TensorView all;
  TensorView expert_offsets;  // [E], like the next two
  TensorView rows_before;
  TensorView kept_rows;
  TensorView source_offsets;  // [E + 1]
  TensorView row_offsets;     // [local + 1]
  TensorView group_rows;      // [local]
  TensorView token_offsets;   // [ranks], used only if tokens cross once

  static GroupTables take(const TakeTable& take, const ExpertPlacement& placement, int rank);
};

}  // namespace switchyard
