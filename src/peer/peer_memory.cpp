// SPDX-License-Identifier: Apache-2.0
#include "peer/peer_memory.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "comm/agreement.h"
#include "comm/failure_listener.h"
#include "comm/gather_numbers.h"
#include "core/given.h"
#include "core/require.h"
#include "core/row_bytes.h"

namespace switchyard {

// Ends the other ranks' meetings when this rank fails, even after its PeerMemory is destroyed.
class GroupListener final : public FailureListener {
 public:
  GroupListener(int rank, std::weak_ptr<GroupFailure> failure)
      : rank_(rank), failure_(std::move(failure)) {}

  void on_failure(std::string_view reason, std::span<const int> world_ranks) noexcept override {
    if (const auto failure = failure_.lock()) failure->give_up(rank_, reason, world_ranks);
    kept_.reset();
  }
  bool is_over() const noexcept override { return failure_.expired(); }

  std::shared_ptr<PeerMemory> memory() const { return memory_.lock(); }
  void set_memory(const std::shared_ptr<PeerMemory>& memory) { memory_ = memory; }
  // Keeps the failure record alive while an exception unwinds this rank, so that the reason can be
  // added later. expect_nothing() undoes this if the rank carries on.
  void expect_reason() { kept_ = failure_.lock(); }
  void expect_nothing() { kept_.reset(); }

 private:
  int rank_;
  std::weak_ptr<GroupFailure> failure_;
  std::weak_ptr<PeerMemory> memory_;
  std::shared_ptr<GroupFailure> kept_;
};

namespace {

std::shared_ptr<PeerMemory> find_known(Communicator& comm, const Device& device) {
  std::shared_ptr<PeerMemory> known;
  for (const auto& listener : FailureListeners::all(comm)) {
    auto* const of_group = dynamic_cast<GroupListener*>(listener.get());
    if (of_group == nullptr) continue;
    of_group->expect_nothing();
    const auto memory = of_group->memory();
    if (memory != nullptr && &memory->comm() == &comm &&
        &backend_of(memory->device()) == &backend_of(device)) {
      known = memory;
    }
  }
  return known;
}

}  // namespace

std::shared_ptr<PeerMemory> PeerMemory::of(Communicator& comm, const Device& device) {
  auto known = find_known(comm, device);
  const auto hellos = exchange_hellos(comm, device, known != nullptr ? known->group_.number : 0);
  if (known != nullptr && std::ranges::all_of(hellos, [&](const PeerHello& hello) {
        return hello.group == known->group_.number;
      })) {
    return known;
  }
  require<Unsupported>(comm.size() <= PeerFailure::kMostRanks,
                       "{} ranks are too many for peer memory: at most {} can share it",
                       comm.size(), int{PeerFailure::kMostRanks});
  const bool are_threads = std::ranges::all_of(
      hellos, [&](const PeerHello& hello) { return hello.process == hellos[0].process; });
  PeerGroup group = are_threads ? make_thread_group(comm, device, hellos)
                                : make_process_group(comm, device, hellos);
  const auto listener = std::make_shared<GroupListener>(comm.rank(), group.failure);
  auto made = std::make_shared<PeerMemory>(comm, device, std::move(group), listener);
  listener->set_memory(made);
  FailureListeners::add(comm, listener);
  comm.barrier();
  return made;
}

PeerMemory::PeerMemory(Communicator& comm, Device device, PeerGroup group,
                       std::shared_ptr<GroupListener> listener)
    : comm_(comm),
      device_(std::move(device)),
      group_(std::move(group)),
      listener_(std::move(listener)),
      words_(backend_of(device_).take({2}, Dtype::i32)),
      bases_(backend_of(device_).take({comm.size()}, Dtype::i64)) {
  backend_of(device_).set_zero(words_);
  backend_of(device_).upload(std::as_bytes(std::span(group_.bases)), bases_);
}

PeerMemory::~PeerMemory() {
  // Gives up first, which ends all meetings: this rank's device may be waiting in one.
  if (std::uncaught_exceptions() > num_exceptions_) {
    listener_->expect_reason();
    group_.failure->give_up(comm_.rank(), {});
  }
  try {
    device_.synchronize();           // before other ranks' heaps may be unmapped
  } catch (const std::exception&) {  // a broken GPU no longer runs anything
  }
}

TensorView PeerMemory::take(const Shape& shape, Dtype dtype) const {
  try {
    return group_.heap->take(shape, dtype);
  } catch (const CommunicationError&) {  // peers did not map the new piece of the heap
    check();
    throw;
  }
}

const std::uint32_t* PeerMemory::failed() const {
  return reinterpret_cast<const std::uint32_t*>(words_.data());
}

void PeerMemory::check() const {
  if (!group_.failure->has_failed()) return;
  const auto [what, ranks, world_ranks] = group_.failure->explain(comm_.timeout());
  FailureListeners::fail(comm_, what,
                         world_ranks ? FailureListeners::ranks_in(comm_, *world_ranks) : ranks);
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
  });  // all devices are idle, so no peer still uses this memory
  device.set_zero(mail_);
  const std::uint32_t before = meetings_before;
  const std::vector<std::uint64_t> signals(static_cast<std::size_t>(ranks),
                                           std::uint64_t{before} << 32);
  device.upload(std::as_bytes(std::span(signals)), mail_.slice(0, ranks));
  const std::array<std::int64_t, 1> own{memory_->offset_of(mail_)};
  const Tensor offsets = gather_numbers(comm, own);
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
    mail_of_ranks_.push_back(memory_->group_.bases[r] + offsets.span<std::int64_t>()[r]);
  }
  device.set_zero(tables_);
  device.upload(std::as_bytes(std::span(mail_of_ranks_)), tables_.slice(0, ranks));
  const std::array<std::int64_t, 1> number{before};
  device.upload(std::as_bytes(std::span(number)), tables_.slice(ranks, ranks + 1));
  auto* const addresses = reinterpret_cast<std::byte* const*>(tables_.data());
  channel_ = {.rank = comm.rank(),
              .num_ranks = comm.size(),
              .heaps = reinterpret_cast<std::byte* const*>(memory_->bases_.data()),
              .mail = addresses,
              .mail_on_host = mail_of_ranks_,
              .mail_words = mail_words,
              .num_meetings = reinterpret_cast<std::uint32_t*>(tables_.data() + 8 * ranks),
              .failed = reinterpret_cast<std::uint32_t*>(memory_->words_.data()),
              .failure = memory_->group_.failure->shared(),
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
