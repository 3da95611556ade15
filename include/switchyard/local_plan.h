// The plan of a rank that is alone, in one tensor of the caller's: for frameworks that keep, save
// and recompute tensors, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "switchyard/device.h"
#include "switchyard/dispatcher.h"
#include "switchyard/experts.h"
#include "switchyard/export.h"
#include "switchyard/plan.h"
#include "switchyard/tensor.h"

namespace switchyard {

struct PadRows;
struct RowTable;

struct LocalPlanOptions {
  std::int64_t num_tokens = 0;  // T
  std::int64_t top_k = 0;       // K
  int num_experts = 0;
  std::int64_t alignment = 1;  // each expert's group starts at a multiple of it
  DuplicateIds duplicate_ids = DuplicateIds::reject;
  SentinelIds sentinel_ids = SentinelIds::reject;

  // Rows that are enough for every routing: T·K, and the padding that the alignment may add.
  SWITCHYARD_API std::int64_t most_rows() const;
  // i32 that the plan's tensor must have.
  SWITCHYARD_API std::int64_t num_words() const;
};

// Views of the plan's tensor. Copying or saving that tensor copies or saves the plan: whoever has
// the options and the tensor has the plan. No function waits for a GPU unless it says so.
//
// Slots, groups and row sources mean what they mean in Plan. Rows that functions are given have the
// plan's num_rows() or more; most_rows() are always enough.
class SWITCHYARD_API LocalPlan {
 public:
  // memory [num_words] i32, contiguous, on 8 bytes, in the device's memory.
  LocalPlan(Device device, const LocalPlanOptions& options, const TensorView& memory);
  LocalPlan(const LocalPlan&) = default;  // and no move, which would leave views of nothing behind
  LocalPlan& operator=(const LocalPlan&) = default;

  // Fills the tensor. expert_ids [T, K] i32 or i64, −1 = no pick. On a CPU bad ids throw; on a GPU
  // they count as −1 until check().
  void make(const ConstTensorView& expert_ids) const;
  // Throws InvalidArgument if make() met bad ids. (waits)
  void check() const;
  // Rows that the experts use, padding included. (waits)
  std::int64_t num_rows() const;

  const LocalPlanOptions& options() const { return options_; }
  ConstTensorView slots() const { return slots_; }              // [T, K] i32
  ConstTensorView row_sources() const { return row_sources_; }  // [most_rows] i32
  RowGroups groups() const;

  // x, y and their gradients are [T, H], rows [≥ num_rows, H]; as Dispatcher's functions.
  void dispatch(const DispatchInput& in, const DispatchOutput& out) const;
  void combine(const CombineInput& in, const TensorView& y) const;
  void combine_backward(const CombineBackwardInput& in, const CombineBackwardOutput& out) const;
  void dispatch_backward(const DispatchBackwardInput& in, const DispatchBackwardOutput& out) const;

 private:
  RowTable table(std::span<std::byte* const> rows) const;
  PadRows pads(const TensorView& rows, const std::optional<TensorView>& scalars) const;

  Device device_;
  LocalPlanOptions options_;
  TensorView problems_;  // i64
  TensorView layout_;    // i64
  TensorView counts_;
  TensorView distinct_tokens_;
  TensorView expert_offsets_;
  TensorView rows_before_;
  TensorView kept_rows_;
  TensorView source_offsets_;
  TensorView row_offsets_;
  TensorView group_rows_;
  TensorView slots_;
  TensorView target_ranks_;
  TensorView sources_;
  TensorView row_sources_;
};

}  // namespace switchyard
