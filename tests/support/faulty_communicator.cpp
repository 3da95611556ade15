// SPDX-License-Identifier: Apache-2.0
#include "support/faulty_communicator.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

namespace switchyard {

// A friend of Communicator, so that it can forward calls unchanged to another one.
class FaultyCommunicator final : public Communicator, public MappedBuffers {
 public:
  using Fault = testing::Fault;

  FaultyCommunicator(Communicator& base, std::unique_ptr<Communicator> owned,
                     std::shared_ptr<testing::FaultPlan> plan)
      : Communicator(base.rank(), base.size(), base.timeout()),
        base_(base),
        owned_(std::move(owned)),
        plan_(std::move(plan)) {}

  std::string_view backend() const override { return base_.backend(); }
  MappedBuffers* mapped_buffers() override {
    return base_.mapped_buffers() == nullptr ? nullptr : this;
  }

  std::vector<std::vector<TensorView>> map(std::span<const TensorView> views) override {
    std::vector<std::vector<TensorView>> all(static_cast<std::size_t>(size()),
                                             {views.begin(), views.end()});
    run_collective("map", "",
                   [&] { forward_whole([&] { all = base_.mapped_buffers()->map(views); }); });
    return all;
  }
  void phase_barrier() override {
    run_collective("phase_barrier", "",
                   [&] { forward_whole([&] { base_.mapped_buffers()->phase_barrier(); }); });
  }

 private:
  void do_all_to_all(const Rows& send, const Rows& recv, std::int64_t row_bytes) override {
    const Damaged damaged(*this, send.data, total_of(send.rows) * row_bytes);
    if (is_time(Fault::drop)) std::fill_n(recv.data, total_of(recv.rows) * row_bytes, std::byte{});
    forward_to_base([&] { base_.do_all_to_all(send, recv, row_bytes); });
  }
  void do_all_gather(const Bytes& send, const Bytes& recv) override {
    const Damaged damaged(*this, send.data, send.bytes);
    // If the call is dropped, it looks as if all ranks had sent the same bytes.
    for (int r = 0; r < size() && is_time(Fault::drop); ++r) {
      std::copy_n(send.data, send.bytes, recv.data + r * send.bytes);
    }
    forward_to_base([&] { base_.do_all_gather(send, recv); });
  }
  void do_broadcast(const Bytes& values, int root) override {
    forward_to_base([&] { base_.do_broadcast(values, root); });
  }
  void do_barrier() override {
    forward_to_base([&] { base_.do_barrier(); });
  }
  std::unique_ptr<Communicator> do_split(int color, int key) override {
    std::unique_ptr<Communicator> part;
    forward([&] { part = base_.split(color, key); });
    if (part == nullptr) return nullptr;
    Communicator& base = *part;
    return std::make_unique<FaultyCommunicator>(base, std::move(part), plan_);
  }
  void do_abort(const std::string& reason, const std::vector<int>& culprits) override {
    if (!plan_->has_left) abort_wrapped(base_, reason, culprits);
  }

  static std::int64_t total_of(std::span<const std::int64_t> rows) {
    return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  }
  bool is_time(Fault fault) const {
    return plan_->fault == fault && static_cast<int>(plan_->calls.size()) == plan_->at_call;
  }
  bool carries_integers() const {
    return detail().find("i32") != std::string::npos || detail().find("i64") != std::string::npos;
  }

  // Flips a bit of the data to send, and flips it back on destruction.
  class Damaged {
   public:
    Damaged(FaultyCommunicator& comm, std::byte* data, std::int64_t bytes) {
      comm.note_call();
      if (comm.is_time(Fault::corrupt) && bytes > 0 && comm.carries_integers()) {
        at_ = data + bytes / 2;
        *at_ ^= std::byte{4};
      }
    }
    ~Damaged() {
      if (at_ != nullptr) *at_ ^= std::byte{4};
    }
    Damaged(const Damaged&) = delete;
    Damaged& operator=(const Damaged&) = delete;

   private:
    std::byte* at_ = nullptr;
  };

  void note_call() {
    if (is_noted_) return;
    is_noted_ = true;
    plan_->calls.push_back(std::string(operation()) +
                           (detail().empty() ? "" : " (" + detail() + ")"));
  }

  // Makes one call of the base, in which the message may be lost or sent twice.
  void forward_to_base(const std::function<void()>& call) {
    forward([&] {
      base_.run_collective(operation(), detail(), [&] {
        if (!is_time(Fault::drop)) call();
        if (is_time(Fault::duplicate)) call();
      });
    });
  }

  void forward(const std::function<void()>& call) {
    note_call();
    is_noted_ = false;
    if (is_time(Fault::delay)) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    if (is_time(Fault::silence)) plan_->be_silent();
    if (is_time(Fault::silence) || is_time(Fault::leave)) {
      plan_->has_left = true;
      throw CommunicationError("left", {rank()});  // the library never catches this
    }
    if (is_time(Fault::throw_error)) throw std::runtime_error("out of coffee");
    if (is_time(Fault::throw_other)) throw 42;
    try {
      call();
    } catch (const CommunicationError& error) {  // of another world with the same numbers
      throw CommunicationError(error.what(), ranks_here(error.world_ranks()));
    }
  }
  // Calls the base once, or not at all if dropped, or twice if duplicated.
  void forward_whole(const std::function<void()>& call) {
    forward([&] {
      if (!is_time(Fault::drop)) call();
      if (is_time(Fault::duplicate)) call();
    });
  }

  Communicator& base_;
  std::unique_ptr<Communicator> owned_;
  std::shared_ptr<testing::FaultPlan> plan_;
  bool is_noted_ = false;
};

namespace testing {

std::string name_of(Fault fault) {
  switch (fault) {
    case Fault::none:
      return "none";
    case Fault::delay:
      return "delay";
    case Fault::drop:
      return "drop";
    case Fault::duplicate:
      return "duplicate";
    case Fault::corrupt:
      return "corrupt";
    case Fault::throw_error:
      return "throw";
    case Fault::throw_other:
      return "throw other";
    case Fault::leave:
      return "leave";
    case Fault::silence:
      return "silence";
  }
  return "unknown";
}

std::unique_ptr<Communicator> make_faulty(Communicator& base, std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyCommunicator>(base, nullptr, std::move(plan));
}

}  // namespace testing
}  // namespace switchyard
