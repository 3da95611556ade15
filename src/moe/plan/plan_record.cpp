// SPDX-License-Identifier: Apache-2.0
// Exchanges records and validates them collectively. All checks use gathered values only, so that
// all ranks reach the same verdict.
#include "moe/plan/plan_record.h"

#include <array>
#include <cstring>
#include <limits>
#include <string_view>

#include "comm/agreement.h"
#include "comm/failure_listener.h"
#include "core/hash.h"
#include "core/require.h"

namespace switchyard {
namespace {

constexpr std::size_t kNumOptions = 13;

std::array<Field, kNumOptions> fields_of(const ExpertPlacement& placement,
                                         const PlanOptions& options, std::int64_t planner_id) {
  return {{{"the order in which layers are made", planner_id},
           {"num_experts", placement.num_experts()},
           {"the placement's num_ranks", placement.num_ranks()},
           {"the placement (its hash)", hash_of(placement.owners())},
           {"hidden", options.hidden},
           {"dtype", static_cast<std::int64_t>(options.dtype)},
           {"alignment", options.alignment},
           {"whether sizing is bounded", options.sizing.is_bounded() ? 1 : 0},
           {"capacity", options.sizing.capacity()},
           {"token_capacity", options.sizing.token_capacity()},
           {"the overflow policy", static_cast<std::int64_t>(options.sizing.overflow())},
           {"duplicate_ids", static_cast<std::int64_t>(options.duplicate_ids)},
           {"sentinel_ids", static_cast<std::int64_t>(options.sentinel_ids)}}};
}

void require_valid_options(int rank, std::span<const std::int64_t> values, int num_ranks) {
  const auto placement_ranks = values[2];
  const auto hidden = values[4];
  const auto dtype = static_cast<Dtype>(values[5]);
  const auto alignment = values[6];
  const bool bounded = values[7] != 0;
  const auto capacity = values[8];
  require(placement_ranks == num_ranks,
          "rank {}: the placement is for {} ranks, but the communicator has {}", rank,
          placement_ranks, num_ranks);
  require(hidden > 0, "rank {}: hidden ({}) must be positive", rank, hidden);
  require(dtype == Dtype::f32 || dtype == Dtype::bf16, "rank {}: rows are f32 or bf16, not {}",
          rank, name_of(dtype));
  require(0 < alignment && alignment <= std::numeric_limits<std::int32_t>::max(),
          "rank {}: alignment ({}) must be positive and below 2^31", rank, alignment);
  if (bounded) require_valid_capacity(capacity, alignment, fmt::format("rank {}: ", rank));
  require(values[9] >= 0, "rank {}: token_capacity ({}) must not be negative", rank, values[9]);
}

constexpr std::size_t kSumWords = 1;

// Returns a checksum of a record's words: corrupted counts would send rows to the wrong places.
std::int32_t sum_of(std::span<const std::int32_t> words) {
  const auto hash = static_cast<std::uint64_t>(hash_of(words));
  return static_cast<std::int32_t>(hash ^ (hash >> 32));
}

// Fails the communicator if the record is corrupted, since other ranks may have received it intact.
void require_undamaged(Communicator& comm, const ConstTensorView& record, int rank) {
  const auto words = record.span<std::int32_t>();
  const auto sum = sum_of(words.first(words.size() - kSumWords));
  if (sum == words.back()) return;
  FailureListeners::fail(
      comm,
      fmt::format("plan: the record of rank {} arrived damaged at rank {}: its words have the sum "
                  "{:08x}, but it says {:08x}",
                  rank, comm.rank(), static_cast<std::uint32_t>(sum),
                  static_cast<std::uint32_t>(words.back())),
      {rank});
}

struct RankValue {
  int rank = 0;
  std::int64_t value = 0;
};

void require_equal(std::string_view name, const RankValue& first, const RankValue& other) {
  require(other.value == first.value, "ranks disagree about {}: rank {} has {}, rank {} has {}",
          name, first.rank, first.value, other.rank, other.value);
}

}  // namespace

void require_same_options(Communicator& comm, const ExpertPlacement& placement,
                          const PlanOptions& options, std::int64_t planner_id) {
  Agreement agreement(comm, {});
  for (const Field& field : fields_of(placement, options, planner_id)) agreement.add(field);
  agreement.gather();
  for (int r = 0; r < comm.size(); ++r) {
    require_valid_options(r, agreement.values_of(r), comm.size());
  }
  agreement.require_equal();
}

void require_valid_capacity(std::int64_t capacity, std::int64_t alignment,
                            const std::string& whose) {
  require(capacity >= 0 && capacity % alignment == 0,
          "{}capacity ({}) must be a multiple of the alignment ({})", whose, capacity, alignment);
  require(capacity <= std::numeric_limits<std::int32_t>::max(),
          "{}capacity ({}) must be below 2^31 rows", whose, capacity);
}

void add_problems(RecordHeader& header, const ConstTensorView& problems) {
  const auto words = problems.span<std::int64_t>();
  header.bad_token = words[kBadToken];
  header.bad_k = words[kBadK];
  header.bad_id = words[kBadId];
  header.bad_is_duplicate = words[kBadIsDuplicate];
  header.non_finite_token = words[kNonFiniteToken];
}

PlanRecords exchange_records(Communicator& comm, const RecordHeader& header,
                             std::span<const std::int32_t> counts,
                             std::span<const std::int32_t> distinct_tokens) {
  constexpr auto kHeaderHalves = sizeof(RecordHeader) / sizeof(std::int32_t);
  const auto words = kHeaderHalves + counts.size() + distinct_tokens.size();
  Tensor own({1, static_cast<std::int64_t>(words + kSumWords)}, Dtype::i32);
  auto* to = own.data();
  std::memcpy(to, &header, sizeof(header));
  std::memcpy(to + sizeof(header), counts.data(), counts.size_bytes());
  std::memcpy(to + sizeof(header) + counts.size_bytes(), distinct_tokens.data(),
              distinct_tokens.size_bytes());
  const auto own_words = own.span<std::int32_t>();
  own_words[words] = sum_of(own_words.first(words));
  Tensor all(own.shape().with_rows(comm.size()), Dtype::i32);
  comm.all_gather(own, all);
  for (int r = 0; r < comm.size(); ++r) require_undamaged(comm, all.view().slice(r, r + 1), r);

  PlanRecords records;
  const auto num_ranks = static_cast<std::size_t>(comm.size());
  records.headers.resize(num_ranks);
  records.counts.resize(num_ranks * counts.size());
  records.distinct_tokens.resize(num_ranks * num_ranks);
  for (std::size_t r = 0; r < num_ranks; ++r) {
    const auto* from = all.view().row(static_cast<std::int64_t>(r));
    std::memcpy(&records.headers[r], from, sizeof(header));
    std::memcpy(records.counts.data() + r * counts.size(), from + sizeof(header),
                counts.size_bytes());
    std::memcpy(records.distinct_tokens.data() + r * num_ranks,
                from + sizeof(header) + counts.size_bytes(), distinct_tokens.size_bytes());
  }
  return records;
}

bool has_valid_form(const RecordHeader& header) {
  return are_ids(static_cast<Dtype>(header.ids_dtype)) && header.ids_dims == 2 &&
         header.ids_memory == header.device_memory && 0 < header.top_k &&
         header.top_k <= kMaxTopK &&
         header.num_tokens <= std::numeric_limits<std::int32_t>::max() / header.top_k;
}

void require_valid_form(const RecordHeader& header, int rank) {
  require(are_ids(static_cast<Dtype>(header.ids_dtype)) && header.ids_dims == 2,
          "rank {}: expert_ids must be [T, K] of i32 or i64, not {} with {} dimensions", rank,
          name_of(static_cast<Dtype>(header.ids_dtype)), header.ids_dims);
  require(header.ids_memory == header.device_memory,
          "rank {}: expert_ids is in {} memory, but the device works in {} memory; copy it with "
          "Device::copy_of",
          rank, name_of(static_cast<Memory>(header.ids_memory)),
          name_of(static_cast<Memory>(header.device_memory)));
  require(0 < header.top_k && header.top_k <= kMaxTopK, "rank {}: K ({}) must be 1 to {}", rank,
          header.top_k, std::int64_t{kMaxTopK});
  require(header.num_tokens <= std::numeric_limits<std::int32_t>::max() / header.top_k,
          "rank {}: {} tokens with {} picks each are more than 2^31 assignments", rank,
          header.num_tokens, header.top_k);
}

void require_same_call(const PlanRecords& records) {
  const RecordHeader& first = records.headers.front();
  for (std::size_t i = 0; i < records.headers.size(); ++i) {
    const RecordHeader& header = records.headers[i];
    const int rank = static_cast<int>(i);
    require_equal("the layer they plan for", {0, first.planner_id}, {rank, header.planner_id});
    require_equal("the number of plans made before", {0, first.plan_number},
                  {rank, header.plan_number});
    require_valid_form(header, rank);
    require_equal("K", {0, first.top_k}, {rank, header.top_k});
    require_equal("the capacity, -1 for exact sizing", {0, first.capacity},
                  {rank, header.capacity});
    require_equal("the capacity for tokens, -1 for exact sizing", {0, first.token_capacity},
                  {rank, header.token_capacity});
    require_equal("the overflow policy", {0, first.overflow}, {rank, header.overflow});
  }
}

std::string describe_bad_ids(const PlanRecords& records, int num_experts) {
  for (std::size_t r = 0; r < records.headers.size(); ++r) {
    const RecordHeader& header = records.headers[r];
    if (header.bad_token < 0) continue;
    const auto where = fmt::format("rank {}: expert_ids[{},{}] is {}", r, header.bad_token,
                                   header.bad_k, header.bad_id);
    return header.bad_is_duplicate != 0
               ? where + ", which the token has picked already"
               : fmt::format("{}, which is neither -1 nor an expert of {}", where, num_experts);
  }
  return {};
}

std::string describe_non_finite(const PlanRecords& records) {
  for (std::size_t r = 0; r < records.headers.size(); ++r) {
    const auto token = records.headers[r].non_finite_token;
    if (token < 0) continue;
    return fmt::format(
        "rank {}: the router's logits of token {} are not finite: x or the gate "
        "holds NaN or infinity, or their product overflows",
        r, token);
  }
  return {};
}

}  // namespace switchyard
