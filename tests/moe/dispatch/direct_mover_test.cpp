// Movement through mapped memory when a rank fails in the middle of it.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "support/device/forwarding_device.h"
#include "support/random.h"
#include "switchyard/dispatcher.h"
#include "switchyard/error.h"
#include "switchyard/run_ranks.h"

namespace switchyard::direct_mover_test {
namespace {

using testing::Random;

// Like a GPU whose launch fails while kernels that it has launched before still write to the
// memory of peers, until it is waited for.
class FailingDevice final : public testing::ForwardingDevice {
 public:
  explicit FailingDevice(std::atomic<bool>& is_writing)
      : ForwardingDevice(Device()), is_writing_(is_writing) {}

  void scatter_rows(const ScatterRows& /*args*/) const override {
    is_writing_ = true;
    throw DeviceError("the launch failed");
  }
  void synchronize() const override { is_writing_ = false; }

 private:
  std::atomic<bool>& is_writing_;
};

TEST(DirectMover, ARankThatFailsIsDoneWithTheMemoryOfPeersBeforeTheyKnow) {
  std::atomic<bool> is_writing = false;
  const auto body = [&](Communicator& comm) {
    const auto placement = ExpertPlacement::contiguous(4, 2);
    const Device device =
        comm.rank() == 1 ? Device(std::make_shared<const FailingDevice>(is_writing)) : Device();
    DispatcherOptions options{.mover = MoverKind::direct};
    options.plan = {.hidden = 8, .dtype = Dtype::f32};
    Dispatcher dispatcher(comm, placement, options, device);
    Random random(1);
    const Tensor ids = random.expert_ids({.num_tokens = 20, .top_k = 2, .num_experts = 4});
    const Tensor x = random.tensor({20, 8}, Dtype::f32);
    const Plan plan = dispatcher.plan(ids);
    Tensor rows({plan.num_rows(), 8}, Dtype::f32);
    if (comm.rank() == 1) {
      EXPECT_THROW(dispatcher.dispatch(plan, {.x = x}, {.rows = rows}), DeviceError);
    } else {
      EXPECT_THROW(dispatcher.dispatch(plan, {.x = x}, {.rows = rows}), CommunicationError);
      EXPECT_FALSE(is_writing);
    }
  };
  run_ranks(2, body);
}

}  // namespace
}  // namespace switchyard::direct_mover_test
