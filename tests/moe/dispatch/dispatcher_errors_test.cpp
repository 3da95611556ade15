// SPDX-License-Identifier: Apache-2.0
// A dispatcher's errors, and that they reach all ranks.
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "support/device/forwarding_device.h"
#include "support/elsewhere.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::dispatcher_errors_test {
namespace {

using testing::elsewhere;
using testing::error_of;
using testing::ForwardingDevice;
using testing::kTestTimeout;
using testing::outcome_of;

constexpr std::int64_t kHidden = 24;

DispatcherOptions options_for(MoverKind mover) {
  return {.plan = {.hidden = kHidden}, .mover = mover};
}

// A wrong argument is an error that says what is expected, and the other ranks learn of it.
TEST(DispatcherErrors, NameTheValues) {
  const auto error_with = [](const std::function<void(Dispatcher&, const Plan&)>& call) {
    const auto world = connect();
    Dispatcher dispatcher(*world, ExpertPlacement::contiguous(2, 1),
                          options_for(MoverKind::automatic));
    const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({2, 1}, {0, 1}));
    return error_of<InvalidArgument>([&] { call(dispatcher, plan); });
  };
  Tensor x({2, kHidden}, Dtype::f32);
  Tensor rows({2, kHidden}, Dtype::f32);
  Tensor weights({2, 1}, Dtype::f32);
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              Tensor short_x({1, kHidden}, Dtype::f32);
              d.dispatch(plan, {.x = short_x}, {.rows = rows});
            }),
            "dispatch: x is f32 [1,24], but the plan has tokens f32 [2,24]");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              Tensor few_rows({1, kHidden}, Dtype::f32);
              d.dispatch(plan, {.x = x}, {.rows = few_rows});
            }),
            "dispatch: rows is f32 [1,24] with row stride 24, but the plan needs contiguous f32 "
            "[2,24] or more rows");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              d.dispatch(plan, {.x = x, .weights = weights}, {.rows = rows});
            }),
            "dispatch: weights was given without row_weights: they go together");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              Tensor wrong({2, 2}, Dtype::f32);
              d.combine(plan, {.rows = rows, .weights = wrong}, x);
            }),
            "combine: weights is f32 [2,2], but must be contiguous f32 [2,1]");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              d.combine_backward(plan, {.d_y = x, .rows = rows}, {.d_rows = rows});
            }),
            "combine_backward: rows was given without d_weights: they go together");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan& plan) {
              Tensor row_weights({1}, Dtype::f32);
              d.dispatch_backward(plan, {.d_rows = rows, .d_row_weights = row_weights},
                                  {.d_x = x, .d_weights = weights});
            }),
            "dispatch_backward: d_row_weights is f32 [1], but must be contiguous f32 [2] or more");
  EXPECT_EQ(error_with([&](Dispatcher& d, const Plan&) {
              const auto other_world = connect();
              Dispatcher other(*other_world, ExpertPlacement::contiguous(2, 1),
                               options_for(MoverKind::automatic));
              const Plan foreign = other.plan(Tensor::from<std::int32_t>({2, 1}, {0, 1}));
              d.dispatch(foreign, {.x = x}, {.rows = rows});
            }),
            "dispatch: the plan was made by another dispatcher");
}

// Nothing that is in another memory than the device's is ever looked at.
TEST(DispatcherErrors, NameBothMemories) {
  const auto world = connect();
  Dispatcher dispatcher(*world, ExpertPlacement::contiguous(2, 1),
                        options_for(MoverKind::automatic));
  const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({2, 1}, {0, 1}));
  Tensor tokens({2, kHidden}, Dtype::f32);
  Tensor weights({2, 1}, Dtype::f32);
  Tensor row_weights({2}, Dtype::f32);
  const auto message = [](const std::string& tensor) {
    return tensor +
           " is in gpu memory, but the device works in host memory; copy it with Device::copy_of";
  };
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)dispatcher.dispatch(plan, elsewhere(tokens)); }),
            message("dispatch: x [2,24]"));
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { dispatcher.dispatch(plan, {.x = tokens}, {.rows = elsewhere(tokens)}); }),
            message("dispatch: rows [2,24]"));
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { (void)dispatcher.combine(plan, tokens, elsewhere(weights)); }),
            message("combine: weights [2,1]"));
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              dispatcher.dispatch_backward(
                  plan, {.d_rows = tokens, .d_row_weights = elsewhere(row_weights)},
                  {.d_x = tokens, .d_weights = weights});
            }),
            message("dispatch_backward: d_row_weights [2]"));
}

TEST(DispatcherErrors, ReachTheOtherRanks) {
  run_ranks(2, [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(2, 2), options_for(MoverKind::direct));
    const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({1, 1}, {0}));
    Tensor x({comm.rank() == 1 ? 3 : 1, kHidden}, Dtype::f32);
    const auto call = [&] { (void)dispatcher.dispatch(plan, x); };
    const std::string message = "dispatch: x is f32 [3,24], but the plan has tokens f32 [1,24]";
    if (comm.rank() == 1) {
      EXPECT_EQ(error_of<InvalidArgument>(call), message);
    } else {
      const auto seen = error_of<CommunicationError>(call);
      EXPECT_NE(seen.find("rank 1 gave up: " + message), std::string::npos) << seen;
    }
  });
}

TEST(DispatcherErrors, RanksMustUseTheSamePlanAndArguments) {
  run_ranks(2, [](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(2, 2), options_for(MoverKind::direct));
    const Tensor ids = Tensor::from<std::int32_t>({1, 1}, {0});
    const Plan first = dispatcher.plan(ids);
    const Plan second = dispatcher.plan(ids);
    const Tensor x = Tensor::zeros({1, kHidden}, Dtype::f32);
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { (void)dispatcher.dispatch(comm.rank() == 0 ? first : second, x); }),
              "ranks use different plans: rank 0 uses its plan 0, rank 1 its plan 1");
    Tensor rows({2, kHidden}, Dtype::f32);
    Tensor weights({1, 1}, Dtype::f32);
    Tensor row_weights({2}, Dtype::f32);
    const auto call = [&] {
      if (comm.rank() == 0) {
        dispatcher.dispatch(first, {.x = x, .weights = weights},
                            {.rows = rows, .row_weights = row_weights});
      } else {
        dispatcher.dispatch(first, {.x = x}, {.rows = rows});
      }
    };
    EXPECT_EQ(error_of<InvalidArgument>(call), "ranks 0 and 1 pass different optional arguments");
    (void)dispatcher.dispatch(first, x);  // and the next call works
  });
}

// With the peer mover, devices compare their calls before they write to each other's memory. A
// difference is a permanent failure.
void expect_different_calls(const std::function<void(Communicator&, Dispatcher&)>& call) {
  const auto outcome = outcome_of(3, kTestTimeout, [&](Communicator& comm) {
    Dispatcher dispatcher(comm, ExpertPlacement::contiguous(3, 3), options_for(MoverKind::peer));
    call(comm, dispatcher);
  });
  EXPECT_LT(outcome.time, kTestTimeout / 3);
  outcome.expect_same(3);
  EXPECT_NE(outcome.reported.find("in another call"), std::string::npos) << outcome.reported;
  EXPECT_NE(outcome.reported.find("rank 1"), std::string::npos) << outcome.reported;
}

TEST(DispatcherErrors, RanksMustUseTheSamePlanInPeerMemory) {
  const Tensor ids = Tensor::from<std::int32_t>({1, 1}, {0});
  const Tensor x = Tensor::zeros({1, kHidden}, Dtype::f32);
  expect_different_calls([&](Communicator& comm, Dispatcher& dispatcher) {
    const Plan first = dispatcher.plan(ids);
    const Plan second = dispatcher.plan(ids);
    (void)dispatcher.dispatch(comm.rank() == 1 ? first : second, x);
  });
  expect_different_calls([&](Communicator& comm, Dispatcher& dispatcher) {
    const Plan plan = dispatcher.plan(ids);
    Tensor rows({3, kHidden}, Dtype::f32);
    Tensor weights({1, 1}, Dtype::f32);
    Tensor row_weights({3}, Dtype::f32);
    if (comm.rank() == 1) {
      dispatcher.dispatch(plan, {.x = x, .weights = weights},
                          {.rows = rows, .row_weights = row_weights});
    } else {
      dispatcher.dispatch(plan, {.x = x}, {.rows = rows});
    }
  });
}

TEST(DispatcherErrors, RanksMustAllTakeRowsOrNone) {
  expect_different_calls([](Communicator& comm, Dispatcher& dispatcher) {
    const Plan plan = dispatcher.plan(Tensor::from<std::int32_t>({1, 1}, {0}));
    Tensor y({1, kHidden}, Dtype::f32);
    const Tensor own = Tensor::zeros({plan.row_capacity(), kHidden}, Dtype::f32);
    const TensorView taken = dispatcher.take_rows(plan);
    dispatcher.combine(plan, {.rows = comm.rank() == 1 ? own.view() : ConstTensorView(taken)}, y);
  });
}

class DeviceWithStream final : public ForwardingDevice {
 public:
  DeviceWithStream(std::uintptr_t stream, int ordinal)
      : ForwardingDevice(Device()), stream_(stream), ordinal_(ordinal) {}
  Stream stream() const override { return {reinterpret_cast<void*>(stream_)}; }
  int ordinal() const override { return ordinal_; }

 private:
  std::uintptr_t stream_;
  int ordinal_;
};

TEST(DispatcherErrors, RanksMustHaveDevicesAndStreamsOfTheirOwn) {
  const auto expect = [](const std::string& expected, const auto& device_of) {
    run_ranks(3, [&](Communicator& comm) {
      const Device device = device_of(comm.rank());
      const auto make = [&](MoverKind mover) {
        Dispatcher(comm, ExpertPlacement::contiguous(3, 3), options_for(mover), device);
      };
      EXPECT_EQ(error_of<InvalidArgument>([&] { make(MoverKind::peer); }), expected);
      make(MoverKind::direct);  // the communicator still works
    });
  };
  const auto with_stream = [](std::uintptr_t stream, int ordinal) {
    return Device(std::make_shared<const DeviceWithStream>(stream, ordinal));
  };
  const std::array<Device, 3> two{Device(), Device(), Device()};
  expect(
      "ranks 0 and 2 share one Device: ranks that use each other's memory need a device of their "
      "own each",
      [&](int rank) { return two.at(rank == 2 ? 0 : static_cast<std::size_t>(rank)); });
  expect(
      "ranks 1 and 2 share one stream: ranks that use each other's memory need a stream of their "
      "own each (CudaOptions::stream)",
      [&](int rank) { return with_stream(rank == 0 ? 64 : 128, 0); });
  expect("no error", [&](int rank) { return with_stream(64, rank); });  // of different GPUs
  expect("no error", [&](int) { return with_stream(2, 0); });           // cudaStreamPerThread
}

TEST(DispatcherErrors, RanksMustMoveAlike) {
  run_ranks(2, [](Communicator& comm) {
    const auto options = options_for(comm.rank() == 0 ? MoverKind::direct : MoverKind::packed);
    EXPECT_EQ(error_of<InvalidArgument>(
                  [&] { Dispatcher(comm, ExpertPlacement::contiguous(2, 2), options); }),
              "ranks disagree about the mover: rank 0 has 1, rank 1 has 2");
  });
}

TEST(DispatcherErrors, PreReducedIsForThePackedMover) {
  const auto world = connect();
  auto options = options_for(MoverKind::direct);
  options.combine = CombineMode::pre_reduced;
  EXPECT_EQ(error_of<InvalidArgument>(
                [&] { Dispatcher(*world, ExpertPlacement::contiguous(2, 1), options); }),
            "combine = pre_reduced works only with the packed mover, not with direct");
  options.mover = MoverKind::automatic;
  Dispatcher dispatcher(*world, ExpertPlacement::contiguous(2, 1), options);
  EXPECT_EQ(dispatcher.mover(), MoverKind::packed);
}

}  // namespace
}  // namespace switchyard::dispatcher_errors_test
