// The small tables of a plan. Those that travel between host and device lie in one piece of memory.
#pragma once

#include <functional>

#include "device/device_backend.h"
#include "moe/plan/plan_record.h"
#include "switchyard/placement.h"
#include "switchyard/tensor.h"

namespace switchyard {

// A contiguous table as one row of numbers.
inline TensorView flat(const TensorView& contiguous) {
  return {contiguous.data(),  contiguous.dtype(), {contiguous.shape().num_elements()}, 1,
          contiguous.owner(), contiguous.memory()};
}

// Where tables come from: the device's own memory, or a tensor of the caller's.
using TakeTable = std::function<TensorView(const Shape& shape, Dtype dtype)>;
inline TakeTable memory_of(const DeviceBackend& device) {
  return [&device](const Shape& shape, Dtype dtype) { return device.take(shape, dtype); };
}

// Cuts one table after the other from a tensor of i32.
class TablePieces {
 public:
  explicit TablePieces(const TensorView& memory) : memory_(memory) {}

  TensorView take(const Shape& shape, Dtype dtype = Dtype::i32) {
    std::byte* const data = memory_.data() + 4 * words_;
    words_ += padded(shape.num_elements() * size_of(dtype) / 4);
    return {data, dtype, shape, shape.row_elements(), memory_.owner(), memory_.memory()};
  }
  std::int64_t words() const { return words_; }

  // So that every table begins on 16 bytes, if the first one does.
  static std::int64_t padded(std::int64_t words) { return (words + 3) / 4 * 4; }

 private:
  TensorView memory_;
  std::int64_t words_ = 0;
};

// A placement, as devices read it.
struct PlacementTables {
  TensorView all;
  TensorView owners;           // [E] i32
  TensorView experts_by_rank;  // [E] i32
  TensorView rank_offsets;     // [ranks + 1] i32

  static PlacementTables make(const DeviceBackend& device, const ExpertPlacement& placement);
};

// What one rank finds out about its own assignments; at one rank it is all there is to know.
struct PlanReport {
  TensorView all;
  TensorView problems;         // [kProblemWords] i64
  TensorView counts;           // [1, E] i32
  TensorView distinct_tokens;  // [ranks] i32
  TensorView layout;           // [layout_words(ranks)] i64

  // [m] i64: all but the layout, which is what other ranks are told.
  TensorView record() const;

  static PlanReport take(const TakeTable& take, const ExpertPlacement& placement);
  // In the memory of `host`; this one if it is there, otherwise a copy that is waited for.
  PlanReport on_host(const DeviceBackend& device, const DeviceBackend& host,
                     const ExpertPlacement& placement) const;
};

// i64 of PlanReport::record().
std::int64_t record_words(const ExpertPlacement& placement);

// The reports of all ranks that have met in each other's memory, behind a header each, and the
// layout that follows from them.
struct PeerReports {
  TensorView all;
  TensorView gathered;         // [ranks, kHeaderWords + m] i64
  TensorView layout;           // [layout_words(ranks)] i64
  TensorView headers;          // [ranks, kHeaderWords] i64, apart as the next three are
  TensorView problems;         // [ranks, kProblemWords] i64
  TensorView counts;           // [ranks, E] i32
  TensorView distinct_tokens;  // [ranks, ranks] i32

  static PeerReports take(const TakeTable& take, const ExpertPlacement& placement);
  // As PlanReport's.
  PeerReports on_host(const DeviceBackend& device, const DeviceBackend& host,
                      const ExpertPlacement& placement) const;
};

// Where the groups lie, as lay_out says.
struct GroupTables {
  TensorView all;
  TensorView expert_offsets;  // [E], as the next two
  TensorView rows_before;
  TensorView kept_rows;
  TensorView source_offsets;  // [E + 1]
  TensorView row_offsets;     // [local + 1]
  TensorView group_rows;      // [local]
  TensorView token_offsets;   // [ranks], where tokens cross once

  static GroupTables take(const TakeTable& take, const ExpertPlacement& placement, int rank);
};

}  // namespace switchyard
