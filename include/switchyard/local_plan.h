// SPDX-License-Identifier: Apache-2.0
// The plan of a single rank, stored in one tensor of the caller, for frameworks that keep, save and
// recompute nothing but tensors.
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

// The sizes and options of a LocalPlan.
struct LocalPlanOptions {
  std::int64_t num_tokens = 0;  // T
  std::int64_t top_k = 0;       // K
  int num_experts = 0;
  std::int64_t alignment = 1;  // every expert's group begins at a multiple of it
  DuplicateIds duplicate_ids = DuplicateIds::reject;
  SentinelIds sentinel_ids = SentinelIds::reject;

  // Returns a number of rows that is enough for every routing: T·K plus the padding that the
  // alignment may add. Throws InvalidArgument if the options are impossible.
  SWITCHYARD_API std::int64_t most_rows() const;
  // Returns the number of i32 elements of the plan's tensor. Throws InvalidArgument if the options
  // are impossible.
  SWITCHYARD_API std::int64_t num_words() const;
};

// A plan as views of one tensor. Options and tensor together are the whole plan, so copying or
// saving the tensor copies or saves the plan. No function waits for a GPU unless its comment says
// so.
//
// Slots, groups and row sources mean the same as in Plan. Tensors of rows must have at least
// num_rows() rows; most_rows() is always enough. Only a CPU checks that there are enough.
class SWITCHYARD_API LocalPlan {
 public:
  // Lays the plan over `memory` [num_words] i32, which is contiguous, aligned to 8 bytes, and in
  // the device's memory. Reads and writes nothing.
  LocalPlan(Device device, const LocalPlanOptions& options, const TensorView& memory);
  // Copied even when moved, because a move would leave empty views behind.
  LocalPlan(const LocalPlan&) = default;
  LocalPlan& operator=(const LocalPlan&) = default;

  // Makes the plan of expert_ids [T, K] i32 or i64, where −1 means no pick. On a CPU, throws
  // InvalidArgument for bad ids. On a GPU, bad ids count as −1, and check() reports them.
  void make(const ConstTensorView& expert_ids) const;
  // Throws InvalidArgument if make() found bad ids. Waits for the GPU.
  void check() const;
  // The number of rows that the experts use, padding included. Waits for the GPU.
  std::int64_t num_rows() const;

  const LocalPlanOptions& options() const { return options_; }
  ConstTensorView slots() const { return slots_; }              // [T, K] i32
  ConstTensorView row_sources() const { return row_sources_; }  // [most_rows] i32
  RowGroups groups() const;

  // The movements of Dispatcher for a single rank. x, y and their gradients are [T, H]; rows and
  // their gradients are [R, H] and row weights [R], with R ≥ num_rows().
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
