// What the ranks tell each other to make a plan, and the checks that give the same error
// everywhere.
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

// More picks a token than any router makes; kernels size their tables by it.
constexpr std::int64_t kMaxTopK = 1024;

// Whether callers may have ids of it.
constexpr bool are_ids(Dtype dtype) { return dtype == Dtype::i32 || dtype == Dtype::i64; }

// Collective. Throws the same InvalidArgument on every rank if any rank's options are wrong or
// differ from another's.
void require_same_options(Communicator& comm, const ExpertPlacement& placement,
                          const PlanOptions& options, std::int64_t planner_id);

// Throws InvalidArgument, its message beginning with `whose`, if a bounded plan cannot have it.
void require_valid_capacity(std::int64_t capacity, std::int64_t alignment,
                            const std::string& whose = {});

// One rank's part of a plan. All numbers are plain, so that it travels as bytes.
struct RecordHeader {
  // Alike on all ranks.
  std::int64_t planner_id = 0;
  std::int64_t top_k = 0;
  std::int64_t capacity = -1;  // of a bounded plan
  std::int64_t token_capacity = -1;
  std::int64_t overflow = 0;     // its policy
  std::int64_t plan_number = 0;  // plans made by this planner before
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
// Those at the beginning that a plan has no rows without: a graph replays the plan's number, too.
constexpr std::int64_t kAlikeWords = 5;

// The records of all ranks: headers, counts of the experts, distinct tokens for the ranks.
struct PlanRecords {
  std::vector<RecordHeader> headers = {};          // [ranks]
  std::vector<std::int32_t> counts = {};           // [ranks, E]
  std::vector<std::int32_t> distinct_tokens = {};  // [ranks, ranks]
};

// Adds what a rank met: problems [kProblemWords] i64 in the host's memory.
void add_problems(RecordHeader& header, const ConstTensorView& problems);

// Collective: the one exchange that a plan costs.
PlanRecords exchange_records(Communicator& comm, const RecordHeader& header,
                             std::span<const std::int32_t> counts,
                             std::span<const std::int32_t> distinct_tokens);

// Whether this rank's ids can be counted; if not, require_same_call will throw on all ranks.
bool has_valid_form(const RecordHeader& header);

// Throws if the ids of this rank have not the form [T, K].
void require_valid_form(const RecordHeader& header, int rank);

// Throws if ranks are not in the same call with the same K, or gave ids of the wrong form.
void require_same_call(const PlanRecords& records);

// The first bad id of any rank, in words; empty if there is none.
std::string describe_bad_ids(const PlanRecords& records, int num_experts);
// The first token of any rank that could not be routed, in words; empty if there is none.
std::string describe_non_finite(const PlanRecords& records);

}  // namespace switchyard
