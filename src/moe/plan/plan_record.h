// SPDX-License-Identifier: Apache-2.0
// The records that ranks exchange to make a plan, and the checks that throw the same error on every
// rank.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/device_backend.h"
#include "switchyard/communicator.h"
#include "switchyard/plan.h"

namespace switchyard {

// The most picks per token, more than any router makes. Kernels size their tables by it.
constexpr std::int64_t kMaxTopK = 1024;

// True if callers may give ids of this dtype.
constexpr bool are_ids(Dtype dtype) { return dtype == Dtype::i32 || dtype == Dtype::i64; }

// Collective. Throws the same InvalidArgument on every rank if any rank's options are wrong or
// differ from another's.
void require_same_options(Communicator& comm, const ExpertPlacement& placement,
                          const PlanOptions& options, std::int64_t planner_id);

// Throws InvalidArgument if a bounded plan cannot have this capacity. The message begins with
// `whose`.
void require_valid_capacity(std::int64_t capacity, std::int64_t alignment,
                            const std::string& whose = {});

// The header of one rank's record. It has only plain numbers, so it can be sent as bytes.
struct RecordHeader {
  // Must be equal on all ranks, up to and including plan_number.
  std::int64_t planner_id = 0;
  std::int64_t top_k = 0;
  std::int64_t capacity = -1;  // −1 for exact sizing; token_capacity too
  std::int64_t token_capacity = -1;
  std::int64_t overflow = 0;     // the overflow policy
  std::int64_t plan_number = 0;  // number of plans that this planner made before
  std::int64_t ids_dtype = 0;
  std::int64_t ids_dims = 0;
  std::int64_t ids_memory = 0;
  std::int64_t device_memory = 0;
  std::int64_t num_tokens = 0;
  std::int64_t bad_token = -1;
  std::int64_t bad_k = 0;
  std::int64_t bad_id = 0;
  std::int64_t bad_is_duplicate = 0;
  std::int64_t non_finite_token = -1;
};
constexpr std::int64_t kHeaderWords = sizeof(RecordHeader) / sizeof(std::int64_t);
// The leading words that lay_out compares: if they differ, the plan has no rows. plan_number is not
// among them, because a graph replays the number that it was captured with.
constexpr std::int64_t kAlikeWords = 5;

// The records of all ranks: headers, counts per expert, and distinct tokens per target rank.
struct PlanRecords {
  std::vector<RecordHeader> headers = {};          // [ranks]
  std::vector<std::int32_t> counts = {};           // [ranks, E]
  std::vector<std::int32_t> distinct_tokens = {};  // [ranks, ranks]
};

// Copies problems, [kProblemWords] i64 in host memory, into the header.
void add_problems(RecordHeader& header, const ConstTensorView& problems);

// Collective. Gathers the records of all ranks: the one exchange that a plan costs.
PlanRecords exchange_records(Communicator& comm, const RecordHeader& header,
                             std::span<const std::int32_t> counts,
                             std::span<const std::int32_t> distinct_tokens);

// True if this rank's ids can be counted. If not, require_same_call throws on all ranks.
bool has_valid_form(const RecordHeader& header);

// Throws if this rank's ids have the wrong dtype, shape or memory.
void require_valid_form(const RecordHeader& header, int rank);

// Throws if ranks are in different calls, differ in K or sizing, or gave ids of the wrong form.
void require_same_call(const PlanRecords& records);

// Describes the first bad id of any rank; empty if there is none.
std::string describe_bad_ids(const PlanRecords& records, int num_experts);
// Describes the first token of any rank that could not be routed; empty if there is none.
std::string describe_non_finite(const PlanRecords& records);

}  // namespace switchyard
