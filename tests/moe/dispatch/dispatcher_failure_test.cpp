// SPDX-License-Identifier: Apache-2.0
// A device that fails on one rank, between the meetings of all: nobody waits for that rank.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>

#include "support/device/forwarding_device.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::dispatcher_failure_test {
namespace {

using testing::error_of;
using testing::ForwardingDevice;
using testing::kTestTimeout;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kHidden = 4;
constexpr int kFailing = 1;  // the rank

// Has no memory for one kind of work.
class FailingDevice final : public ForwardingDevice {
 public:
  explicit FailingDevice(std::string_view fails_in)
      : ForwardingDevice(Device::cpu({.num_threads = 1})), fails_in_(fails_in) {}

  void count_assignments(const CountAssignments& args) const override {
    fail_in("count_assignments");
    base().count_assignments(args);
  }
  void lay_out(const LayOut& args) const override {
    fail_in("lay_out");
    base().lay_out(args);
  }
  void assign_slots(const AssignSlots& args) const override {
    fail_in("assign_slots");
    base().assign_slots(args);
  }
  void scatter_rows(const ScatterRows& args) const override {
    fail_in("scatter_rows");
    base().scatter_rows(args);
  }
  void gather_rows(const GatherRows& args) const override {
    fail_in("gather_rows");
    base().gather_rows(args);
  }
  void fill_rows(const FillRows& args) const override {
    fail_in("fill_rows");
    base().fill_rows(args);
  }
  void dot_rows(const DotRows& args) const override {
    fail_in("dot_rows");
    base().dot_rows(args);
  }
  TensorView take(const Shape& shape, Dtype dtype) const override {
    if (shape == kLarge) fail_in("take");
    if (shape == kLarge && fails_in_ == "new") throw std::bad_alloc();
    return base().take(shape, dtype);
  }

  static inline const Shape kLarge{3, kHidden};  // rows, and tokens

 private:
  void fail_in(std::string_view work) const {
    if (fails_in_ == work) throw DeviceError("no memory to " + std::string(work));
  }

  std::string_view fails_in_;
};

Device device_of(const Communicator& comm, std::string_view fails_in) {
  return Device(
      std::make_shared<const FailingDevice>(comm.rank() == kFailing ? fails_in : "nothing"));
}

// Each rank has tokens for all.
Tensor three_ids() { return Tensor::from<std::int32_t>({3, 1}, {0, 1, 2}); }

void move(Dispatcher& dispatcher) {
  const Plan plan = dispatcher.plan(three_ids());
  const Tensor x = Tensor::zeros({3, kHidden}, Dtype::f32);
  Tensor weights = Tensor::zeros({3, 1}, Dtype::f32);
  Tensor rows = dispatcher.dispatch(plan, x);
  Tensor y = dispatcher.combine(plan, rows, weights);
  dispatcher.combine_backward(plan, {.d_y = x, .weights = weights, .rows = rows},
                              {.d_rows = rows, .d_weights = weights});
  dispatcher.dispatch_backward(plan, {.d_rows = rows}, {.d_x = y});
  (void)dispatcher.plan(three_ids());  // who has not waited for the rank hears of it here
}

struct Failure {
  std::string_view work;
  std::string_view operation;
};
void PrintTo(const Failure& failure, std::ostream* out) { *out << failure.work; }

// The rank that fails has its own error; the others learn which it was, and why, at once.
void expect_all_learn(const Failure& failure, const Communicator& comm,
                      const std::function<void()>& work) {
  const auto begin = Clock::now();
  if (comm.rank() == kFailing && failure.work == "new") {
    EXPECT_NE(error_of<std::bad_alloc>(work), "no error");
  } else if (comm.rank() == kFailing) {
    EXPECT_EQ(error_of<DeviceError>(work), "no memory to " + std::string(failure.work));
  } else {
    const auto error = error_of<CommunicationError>(work);
    EXPECT_NE(error.find("rank 1 gave up: " + std::string(failure.operation)), std::string::npos)
        << error;
  }
  EXPECT_LT(Clock::now() - begin, kTestTimeout / 3);
}

class DispatcherFailure : public ::testing::TestWithParam<Failure> {};

TEST_P(DispatcherFailure, OfOneDeviceIsKnownToAllRanksAtOnce) {
  const auto failure = GetParam();
  for (const auto mover : {MoverKind::peer, MoverKind::direct, MoverKind::packed}) {
    // The others send tokens by other ways, and these to fewer of them.
    if (mover != MoverKind::peer && failure.work == "fill_rows") continue;
    if (mover == MoverKind::packed && failure.work == "dot_rows") continue;
    run_ranks(3,
              [&](Communicator& comm) {
                Dispatcher dispatcher(comm, ExpertPlacement::contiguous(3, 3),
                                      {.plan = {.hidden = kHidden}, .mover = mover},
                                      device_of(comm, failure.work));
                // The direct mover tells the others itself, before its memory goes.
                const auto operation = mover == MoverKind::direct ? "" : failure.operation;
                expect_all_learn({failure.work, operation}, comm, [&] { move(dispatcher); });
              },
              {.timeout = kTestTimeout});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Work, DispatcherFailure,
    ::testing::Values(Failure{"count_assignments", "plan"}, Failure{"lay_out", "plan"},
                      Failure{"assign_slots", "plan"}, Failure{"take", "dispatch"},
                      Failure{"new", "dispatch"}, Failure{"scatter_rows", "dispatch"},
                      Failure{"fill_rows", "dispatch"}, Failure{"gather_rows", "combine"},
                      Failure{"dot_rows", "combine_backward"}),
    ::testing::PrintToStringParamName());

TEST(PlannerFailure, OfOneDeviceIsKnownToAllRanksAtOnce) {
  for (const std::string_view work : {"count_assignments", "assign_slots"}) {
    run_ranks(2,
              [&](Communicator& comm) {
                Planner planner(comm, ExpertPlacement::contiguous(3, 2), {.hidden = kHidden},
                                device_of(comm, work));
                expect_all_learn({work, "plan"}, comm, [&] {
                  (void)planner.plan(three_ids());
                  (void)planner.plan(three_ids());
                });
              },
              {.timeout = kTestTimeout});
  }
}

}  // namespace
}  // namespace switchyard::dispatcher_failure_test
