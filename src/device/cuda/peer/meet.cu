// SPDX-License-Identifier: Apache-2.0
// Meets the other ranks. Only a single block waits, so the rest of the GPU stays free for the work
// that other ranks need done.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "device/cuda/kernels.h"
#include "device/cuda/plan/assignments.cuh"
#include "device/cuda/whole_sums.cuh"

namespace switchyard::cuda {
namespace {

constexpr int kMeetThreads = PeerFailure::kMostRanks;
constexpr int kRankWords = PeerFailure::kMostRanks / 32;

// For up to this many ranks, the mail addresses are kernel parameters; otherwise the kernel reads
// them from memory.
constexpr int kNearRanks = 32;

struct MeetWork {
  int rank;
  int num_ranks;
  std::byte* const* heaps;
  std::byte* const* mail;
  std::int64_t mail_words;
  std::uint32_t* num_meetings;
  std::uint32_t* failed;
  PeerFailure* failure;
  std::uint64_t timeout_ns;
  std::uint32_t meeting;
  std::uint32_t tag;
  int num_words;
  int record_words;
  const std::int64_t* record;
  std::int64_t* gathered;  // or null
  std::int64_t gathered_stride;
  std::int64_t* addresses;  // or null
  int num_lent;
  std::uint32_t* cleared;  // or null
  std::int64_t cleared_words;
  std::int64_t words[kMostMeetWords];
  std::byte* near_mail[kNearRanks];

  __device__ std::byte* mail_of(int r) const {
    return num_ranks <= kNearRanks ? near_mail[r] : mail[r];
  }
  __device__ std::uint64_t* signal(int at, int source) const {
    return reinterpret_cast<std::uint64_t*>(mail_of(at)) + source;
  }
  __device__ std::int64_t* slot(int at, int source, std::uint32_t number) const {
    const std::int64_t index = static_cast<std::int64_t>(number % 2) * num_ranks + source;
    auto* const slots = mail_of(at) + PeerChannel::kSlotsAt;
    return reinterpret_cast<std::int64_t*>(slots) + index * mail_words;
  }
};

__device__ std::uint64_t nanoseconds() {
  std::uint64_t time = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
__device__ void store_release(std::uint64_t* at, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ std::uint64_t load_acquire(const std::uint64_t* at) {
  std::uint64_t value = 0;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

// Reads host memory, which is slow.
__device__ bool has_failed(const MeetWork& w) {
  return *static_cast<volatile const std::uint32_t*>(&w.failure->by) != 0;
}

// Writes this rank's words and record to all mail, then sets the signals. Called by all threads.
__device__ void publish(const MeetWork& w, std::uint32_t number) {
  const int words = w.num_words + w.record_words;
  for (int i = static_cast<int>(threadIdx.x); i < words * w.num_ranks; i += blockDim.x) {
    const int to = i / words;
    const int word = i % words;
    w.slot(to, w.rank, number)[word] =
        word < w.num_words ? w.words[word] : w.record[word - w.num_words];
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r < w.num_ranks) {
    store_release(w.signal(r, w.rank), static_cast<std::uint64_t>(number) << 32 | w.tag);
  }
}

enum class Came : int { yes, no, elsewhere };

// Waits for rank r. Called by thread r.
__device__ Came wait_for(const MeetWork& w, int r, std::uint32_t number) {
  constexpr int kLooks = 64;  // polls between checks of the clock and of host memory
  const std::uint64_t* const at = w.signal(w.rank, r);
  std::uint64_t deadline = 0;
  while (true) {
    for (int i = 0; i < kLooks; ++i) {
      const std::uint64_t signal = load_acquire(at);
      const auto other = static_cast<std::uint32_t>(signal >> 32);
      if (static_cast<std::int32_t>(other - number) < 0) continue;
      const bool is_elsewhere = other == number && static_cast<std::uint32_t>(signal) != w.tag;
      return is_elsewhere ? Came::elsewhere : Came::yes;
    }
    const std::uint64_t now = nanoseconds();
    if (deadline == 0) deadline = now + w.timeout_ns;
    if (now > deadline || has_failed(w)) return Came::no;
  }
}

// Reports the failure, unless a rank has given up before. Called by one thread.
__device__ void give_up(const MeetWork& w, PeerFailure::Kind kind, const std::uint32_t* ranks) {
  if (has_failed(w)) return;
  PeerFailure::Part* const part = reinterpret_cast<PeerFailure::Part*>(&w.failure->parts) + w.rank;
  auto* const named = reinterpret_cast<std::uint32_t*>(&part->ranks);
  part->kind = kind;
  part->operation = w.meeting;
  for (int i = 0; i < kRankWords; ++i) named[i] = ranks[i];
  __threadfence_system();
  *static_cast<volatile std::uint32_t*>(&w.failure->by) = static_cast<std::uint32_t>(w.rank) + 1;
}

// Writes the results of the meeting, or of its failure. Called by all threads.
__device__ void collect(const MeetWork& w, std::uint32_t number, bool has_met) {
  const int words = w.num_words + w.record_words;
  if (w.gathered != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < words * w.num_ranks; i += blockDim.x) {
      const int r = i / words;
      const int word = i % words;
      w.gathered[r * w.gathered_stride + word] =
          has_met ? __ldcg(w.slot(w.rank, r, number) + word) : 0;
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < w.num_lent * w.num_ranks; i += blockDim.x) {
    const int r = i % w.num_ranks;
    const std::int64_t offset =
        has_met ? __ldcg(w.slot(w.rank, r, number) + i / w.num_ranks) : kNothingLent;
    w.addresses[i] =
        offset == kNothingLent ? 0 : reinterpret_cast<std::int64_t>(w.heaps[r]) + offset;
  }
  if (has_met || w.cleared == nullptr) return;
  for (std::int64_t i = threadIdx.x; i < w.cleared_words; i += blockDim.x) w.cleared[i] = 0;
}

__global__ void __launch_bounds__(kMeetThreads) meet_ranks(const __grid_constant__ MeetWork w) {
  __shared__ std::uint32_t missing[kRankWords];
  __shared__ std::uint32_t elsewhere[kRankWords];
  const int r = static_cast<int>(threadIdx.x);
  const std::uint32_t number = *w.num_meetings + 1;
  const bool is_over = *w.failed != 0;
  bool has_met = false;
  if (!is_over) {
    publish(w, number);
    const Came came = r < w.num_ranks ? wait_for(w, r, number) : Came::yes;
    has_met = __syncthreads_and(came == Came::yes ? 1 : 0) != 0;
    if (!has_met) {
      if (r < kRankWords) missing[r] = elsewhere[r] = 0;
      __syncthreads();
      if (came == Came::no) atomicOr(missing + r / 32, 1U << (r % 32));
      if (came == Came::elsewhere) atomicOr(elsewhere + r / 32, 1U << (r % 32));
      const bool any_elsewhere = __syncthreads_or(came == Came::elsewhere ? 1 : 0) != 0;
      if (r == 0) {
        give_up(w, any_elsewhere ? PeerFailure::other_call : PeerFailure::missing,
                any_elsewhere ? elsewhere : missing);
      }
    }
  }
  collect(w, number, has_met);
  __syncthreads();  // every thread has read num_meetings by now
  if (r != 0) return;
  *w.num_meetings = number;
  if (!has_met) *w.failed = 1;
}

}  // namespace

void meet(const Meet& args, Context& context) {
  const PeerChannel& channel = args.channel;
  const bool has_record = args.record.data() != nullptr;
  const bool gathers = args.gathered.data() != nullptr;
  const bool lends = args.addresses.data() != nullptr;
  MeetWork w{
      .rank = channel.rank,
      .num_ranks = channel.num_ranks,
      .heaps = channel.heaps,
      .mail = channel.mail,
      .mail_words = channel.mail_words,
      .num_meetings = channel.num_meetings,
      .failed = channel.failed,
      .failure = channel.failure,
      .timeout_ns = static_cast<std::uint64_t>(channel.timeout.count()),
      .meeting = static_cast<std::uint32_t>(args.meeting),
      .tag = tag_of(args),
      .num_words = static_cast<int>(args.words.size()),
      .record_words = has_record ? static_cast<int>(args.record.rows()) : 0,
      .record = has_record ? elements<std::int64_t>(args.record) : nullptr,
      .gathered = gathers ? elements<std::int64_t>(args.gathered) : nullptr,
      .gathered_stride = gathers ? args.gathered.row_stride() : 0,
      .addresses = lends ? elements<std::int64_t>(args.addresses) : nullptr,
      .num_lent = lends ? static_cast<int>(args.addresses.rows()) : 0,
      .cleared = args.cleared.data() != nullptr ? elements<std::uint32_t>(args.cleared) : nullptr,
      .cleared_words = args.cleared.data() != nullptr ? args.cleared.bytes() / 4 : 0,
      .words = {},
      .near_mail = {}};
  std::ranges::copy(args.words, w.words);
  if (channel.num_ranks <= kNearRanks) std::ranges::copy(channel.mail_on_host, w.near_mail);
  const int threads =
      args.record.data() != nullptr || channel.num_ranks > kWarpLanes ? kMeetThreads : kWarpLanes;
  meet_ranks<<<1, threads, 0, context.stream()>>>(w);
  check(cudaGetLastError(), "meet_ranks");
}

}  // namespace switchyard::cuda
