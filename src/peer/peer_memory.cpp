#include "peer/peer_memory.h"

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>

#include "comm/agreement.h"
#include "comm/failure_listener.h"
#include "core/given.h"
#include "core/require.h"
#include "core/row_bytes.h"

namespace switchyard {

// What all ranks of a group hold together.
struct PeerGroup {
  explicit PeerGroup(const DeviceBackend& device, int num_ranks)
      : failure_memory(device.take_shared(sizeof(PeerFailure))),
        failure(reinterpret_cast<PeerFailure*>(failure_memory.get())),
        heaps(static_cast<std::size_t>(num_ranks)) {}

  std::uint32_t failed_by() const {
    return std::atomic_ref(failure->by).load(std::memory_order_acquire);
  }

  // For a rank that fails, or knows of one that has, elsewhere than in a meeting. It may say why
  // later.
  void give_up(int rank, std::string_view cause) noexcept {
    const std::scoped_lock lock(mutex);
    if (failed_by() != 0) {
      if (static_cast<int>(failed_by()) == rank + 1 && reason.empty()) reason = cause;
      return;
    }
    auto& part = failure->parts[static_cast<std::size_t>(rank)];
    if (part.kind != PeerFailure::none) return;  // this rank's device is giving up
    reason = cause;
    part.kind = PeerFailure::gave_up;
    std::uint32_t nobody = 0;
    std::atomic_ref(failure->by)
        .compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank) + 1);
  }

  // Of a rank that gave up by itself. An error that ends it is known to those who catch it alone,
  // a little later.
  std::string why() {
    using Clock = std::chrono::steady_clock;
    constexpr auto kLittle = std::chrono::milliseconds(300);
    for (const auto end = Clock::now() + kLittle; Clock::now() < end;) {
      {
        const std::scoped_lock lock(mutex);
        if (!reason.empty()) return reason;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return "it was ended by an error";
  }

  std::shared_ptr<std::byte> failure_memory;
  PeerFailure* failure;
  std::int64_t number = 0;  // of the registry, from 1
  std::mutex mutex;
  std::vector<std::shared_ptr<PeerHeap>> heaps;
  std::string reason;  // of the rank that gave up
};

namespace {

// Groups that are being made, by a number that their ranks tell each other.
class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }
  std::int64_t add(const std::shared_ptr<PeerGroup>& group) {
    const std::scoped_lock lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    group->number = ++last_;
    groups_[last_] = group;
    return last_;
  }
  std::shared_ptr<PeerGroup> find(std::int64_t number) {
    const std::scoped_lock lock(mutex_);
    const auto found = groups_.find(number);
    return found == groups_.end() ? nullptr : found->second.lock();
  }
  std::int64_t process() const { return process_; }

 private:
  static std::int64_t random_number() {
    std::random_device random;
    return static_cast<std::int64_t>(std::uint64_t{random()} << 32 | random());
  }

  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::int64_t process_ = random_number();  // differs from that of every other process
  std::map<std::int64_t, std::weak_ptr<PeerGroup>> groups_;
};

// Ends the others' meetings when a rank fails, though its own part may be gone by then.
class GroupListener final : public FailureListener {
 public:
  GroupListener(int rank, std::weak_ptr<PeerGroup> group, std::weak_ptr<PeerMemory> memory)
      : rank_(rank), group_(std::move(group)), memory_(std::move(memory)) {}

  void on_failure(std::string_view reason) noexcept override {
    if (const auto group = group_.lock()) group->give_up(rank_, reason);
  }
  bool is_over() const noexcept override { return group_.expired(); }
  std::shared_ptr<PeerMemory> memory() const { return memory_.lock(); }

 private:
  int rank_;
  std::weak_ptr<PeerGroup> group_;
  std::weak_ptr<PeerMemory> memory_;
};

// [ranks, n]
Tensor gather_numbers(Communicator& comm, std::span<const std::int64_t> own) {
  const auto n = static_cast<std::int64_t>(own.size());
  Tensor all({comm.size(), n}, Dtype::i64);
  comm.all_gather(ConstTensorView(own.data(), {1, n}), all);
  return all;
}

// Kernels that wait for other ranks of this process must not hold up what those need: a queue of
// the GPU that streams share, or the loading of a kernel.
void warn_of_environment(const Device& device, int rank) {
  static std::once_flag warned;
  const auto value_of = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (device.memory() == Memory::host || rank != 0) return;
  constexpr int kMostStreams = 32;
  const int connections = std::atoi(value_of("CUDA_DEVICE_MAX_CONNECTIONS").c_str());
  if (connections >= kMostStreams && value_of("CUDA_MODULE_LOADING") == "EAGER") return;
  std::call_once(warned, [] {
    std::cerr << "switchyard: ranks are threads that share GPUs: set "
                 "CUDA_DEVICE_MAX_CONNECTIONS=32 and CUDA_MODULE_LOADING=EAGER before the program "
                 "starts, or a rank that waits may hold up the one it waits for\n";
  });
}

std::string_view name_of(std::uint32_t meeting) {
  switch (static_cast<Meeting>(meeting)) {
    case Meeting::plan:
      return "the exchange of a plan's records";
    case Meeting::ready:
      return "the beginning of a movement";
    case Meeting::done:
      return "the end of a movement";
    case Meeting::close:
      return "the end of the movement before";
    case Meeting::sums:
      return "the exchange of a batch's sums";
  }
  return "a meeting";
}

std::vector<int> ranks_of(const PeerFailure::Part& part) {
  std::vector<int> ranks;
  for (int r = 0; r < PeerFailure::kMostRanks; ++r) {
    if ((part.ranks[static_cast<std::size_t>(r / 32)] >> (r % 32) & 1U) != 0) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace

std::shared_ptr<PeerMemory> PeerMemory::of(Communicator& comm, const Device& device) {
  std::shared_ptr<PeerMemory> known;
  for (const auto& listener : FailureListeners::all(comm)) {
    const auto* const of_group = dynamic_cast<const GroupListener*>(listener.get());
    const auto memory = of_group != nullptr ? of_group->memory() : nullptr;
    if (memory != nullptr && &memory->comm_ == &comm &&
        &backend_of(memory->device_) == &backend_of(device)) {
      known = memory;
    }
  }
  const std::array<std::int64_t, 3> own{known != nullptr ? known->group_->number : 0,
                                        Registry::instance().process(),
                                        backend_of(device).ordinal()};
  const Tensor all = gather_numbers(comm, own);
  std::vector<int> ordinals;
  bool all_know = own[0] != 0;  // the same group
  for (std::int64_t r = 0; r < comm.size(); ++r) {
    const auto other = all.view().slice(r, r + 1).span<std::int64_t>();
    all_know = all_know && other[0] == own[0];
    require<Unsupported>(other[1] == all.span<std::int64_t>()[1],
                         "ranks 0 and {} are in different processes: on GPUs, and with the peer "
                         "mover, ranks are threads of one process (run_ranks)",
                         r);
    ordinals.push_back(static_cast<int>(other[2]));
  }
  if (all_know) return known;
  require<Unsupported>(comm.size() <= PeerFailure::kMostRanks,
                       "{} ranks are more than the {} that reach each other's memory", comm.size(),
                       int{PeerFailure::kMostRanks});
  warn_of_environment(device, comm.rank());
  std::shared_ptr<PeerGroup> group;
  std::int64_t number = 0;
  agree(comm, "peer memory", [&] {
    if (comm.rank() == 0) {
      group = std::make_shared<PeerGroup>(backend_of(device), comm.size());
      number = Registry::instance().add(group);
    }
  });
  comm.broadcast(TensorView(&number, {1}), 0);
  if (group == nullptr) group = Registry::instance().find(number);
  std::shared_ptr<PeerMemory> made;
  agree(comm, "peer memory", [&] {
    require<InternalError>(group != nullptr, "rank 0 has gone");
    const std::scoped_lock lock(group->mutex);
    group->heaps[static_cast<std::size_t>(comm.rank())] =
        backend_of(device).make_peer_heap(ordinals);
  });
  made = std::make_shared<PeerMemory>(comm, device, group);
  FailureListeners::add(comm, std::make_shared<GroupListener>(comm.rank(), group, made));
  comm.barrier();
  return made;
}

PeerMemory::PeerMemory(Communicator& comm, Device device, std::shared_ptr<PeerGroup> group)
    : comm_(comm),
      device_(std::move(device)),
      group_(std::move(group)),
      heap_(group_->heaps[static_cast<std::size_t>(comm.rank())]),
      words_(backend_of(device_).take({2}, Dtype::i32)),
      bases_(backend_of(device_).take({comm.size()}, Dtype::i64)) {
  std::vector<std::byte*> bases;
  for (const auto& heap : group_->heaps) bases.push_back(heap->base());
  backend_of(device_).set_zero(words_);
  backend_of(device_).upload(std::as_bytes(std::span(bases)), bases_);
}

PeerMemory::~PeerMemory() {
  // The others' meetings end first: this rank's device may wait for them.
  if (std::uncaught_exceptions() > num_exceptions_) {
    group_->give_up(comm_.rank(), {});
  }
  try {
    device_.synchronize();           // before the heaps of others may go
  } catch (const std::exception&) {  // a broken GPU does nothing any more
  }
}

const std::uint32_t* PeerMemory::failed() const {
  return reinterpret_cast<const std::uint32_t*>(words_.data());
}

void PeerMemory::check() const {
  const std::uint32_t by = group_->failed_by();
  if (by == 0) return;
  const int rank = static_cast<int>(by) - 1;
  const PeerFailure::Part& part = group_->failure->parts[by - 1];
  std::vector<int> ranks = ranks_of(part);
  std::string what;
  switch (part.kind) {
    case PeerFailure::missing:
      what =
          fmt::format("rank{} {} did not come to {} within {:g} s, which rank {} waited",
                      ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "), name_of(part.operation),
                      std::chrono::duration<double>(comm_.timeout()).count(), rank);
      break;
    case PeerFailure::other_call:
      what = fmt::format("rank {} is in {}, and rank{} {} in another call", rank,
                         name_of(part.operation), ranks.size() == 1 ? "" : "s",
                         fmt::join(ranks, ", "));
      break;
    default:
      what = fmt::format("rank {} gave up: {}", rank, group_->why());
      ranks = {rank};
  }
  FailureListeners::fail(comm_, what, ranks);
  throw CommunicationError(what, ranks);
}

PeerMeetings::PeerMeetings(std::shared_ptr<PeerMemory> memory, std::int64_t record_words)
    : memory_(std::move(memory)) {
  Communicator& comm = memory_->comm();
  const DeviceBackend& device = backend_of(memory_->device());
  const std::int64_t ranks = comm.size();
  const auto mail_words = static_cast<std::int64_t>(kMostMeetWords) + record_words;
  agree(comm, "peer memory", [&] {
    mail_ = memory_->take({PeerChannel::mail_bytes(comm.size(), mail_words) / 8 + 1}, Dtype::i64);
    tables_ = device.take({ranks + 1}, Dtype::i64);
    device.synchronize();
  });  // which nobody is at any more
  device.set_zero(mail_);
  const std::array<std::int64_t, 1> own{memory_->offset_of(mail_)};
  const Tensor offsets = gather_numbers(comm, own);
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
    const auto& heap = memory_->group_->heaps[r];
    mail_of_ranks_.push_back(heap->base() + offsets.span<std::int64_t>()[r]);
  }
  device.set_zero(tables_);
  device.upload(std::as_bytes(std::span(mail_of_ranks_)), tables_.slice(0, ranks));
  auto* const addresses = reinterpret_cast<std::byte* const*>(tables_.data());
  channel_ = {.rank = comm.rank(),
              .num_ranks = comm.size(),
              .heaps = reinterpret_cast<std::byte* const*>(memory_->bases_.data()),
              .mail = addresses,
              .mail_on_host = mail_of_ranks_,
              .mail_words = mail_words,
              .num_meetings = reinterpret_cast<std::uint32_t*>(tables_.data() + 8 * ranks),
              .failed = reinterpret_cast<std::uint32_t*>(memory_->words_.data()),
              .failure = memory_->group_->failure,
              .timeout = comm.timeout(),
              .check = memory_};
  device.synchronize();
  comm.barrier();
}

PeerMeetings::~PeerMeetings() = default;

void PeerMeetings::meet(const Meet& args) const {
  backend_of(memory_->device()).meet(args);
  if (memory_->device().memory() == Memory::host) memory_->check();
}

TensorView PeerMeetings::lend(std::span<const TensorView> lent, std::uint32_t detail) const {
  std::vector<std::int64_t> offsets;
  for (const TensorView& view : lent) {
    offsets.push_back(is_given(view) ? memory_->offset_of(view) : kNothingLent);
  }
  const auto num_lent = static_cast<std::int64_t>(lent.size());
  TensorView addresses =
      backend_of(memory_->device()).take({num_lent, memory_->comm().size()}, Dtype::i64);
  meet({.channel = channel_,
        .meeting = Meeting::ready,
        .detail = detail,
        .words = offsets,
        .addresses = addresses});
  return addresses;
}

void PeerMeetings::finish(const TensorView& cleared, std::uint32_t detail) const {
  meet({.channel = channel_, .meeting = Meeting::done, .detail = detail, .cleared = cleared});
}

void PeerMeetings::close() const { meet({.channel = channel_, .meeting = Meeting::close}); }

void PeerMeetings::gather(Meeting meeting, std::span<const std::int64_t> words,
                          const ConstTensorView& record, const TensorView& gathered) const {
  meet({.channel = channel_,
        .meeting = meeting,
        .words = words,
        .record = record,
        .gathered = gathered});
}

}  // namespace switchyard
