// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job whose ranks reach each other's memory, and of which one comes to grief in
// the middle of a step. Every rank writes what it saw, as MpiJob says.
//   step_failure DIR SCENARIO STAGE TIMEOUT_MS DEVICE
// Scenarios, all by rank 2: kill (SIGKILL), stop (SIGSTOP), throw, no-memory (an allocation fails),
// fault (a kernel reads where there is no memory, and the GPU does nothing for this process any
// more) and none. Stages: plan, dispatch, experts, combine. Devices: cpu, cuda.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "support/device/forwarding_device.h"
#include "support/mpi_rank.h"
#include "switchyard/switchyard.h"

namespace {

using namespace switchyard;
using namespace switchyard::testing;

constexpr int kVictim = 2;
constexpr int kSoundSteps = 3;

// Comes to grief at a stage, once it is time.
class DoomedDevice final : public ForwardingDevice {
 public:
  DoomedDevice(const Device& base, std::string scenario, std::string stage)
      : ForwardingDevice(base), scenario_(std::move(scenario)), stage_(std::move(stage)) {}

  void meet(const Meet& args) const override {
    if (args.meeting == Meeting::plan) at("plan");
    ForwardingDevice::meet(args);
  }
  void scatter_rows(const ScatterRows& args) const override {
    at("dispatch");
    ForwardingDevice::scatter_rows(args);
  }
  void experts_forward(const ExpertsForward& args) const override {
    at("experts");
    ForwardingDevice::experts_forward(args);
  }
  void gather_rows(const GatherRows& args) const override {
    at("combine");
    ForwardingDevice::gather_rows(args);
  }
  void doom() const { is_time_ = true; }

 private:
  void at(const std::string& stage) const {
    if (!is_time_ || stage != stage_) return;
    if (scenario_ == "kill") ::raise(SIGKILL);
    if (scenario_ == "stop") ::raise(SIGSTOP);
    if (scenario_ == "throw") throw std::runtime_error("out of coffee");
    if (scenario_ == "no-memory") throw DeviceError("no room for 4096 bytes");
    if (scenario_ == "fault") read_nowhere();
  }
  void read_nowhere() const {
    const Shape shape{2, 2};
    const TensorView nowhere(reinterpret_cast<std::byte*>(4096), Dtype::i64, shape,
                             shape.row_elements(), nullptr, Memory::gpu);
    const TensorView to(reinterpret_cast<std::byte*>(4096), Dtype::i32, shape, shape.row_elements(),
                        nullptr, Memory::gpu);
    ForwardingDevice::narrow_ids({.from = nowhere, .to = to});
  }

  std::string scenario_;
  std::string stage_;
  mutable bool is_time_ = false;
};

void train(Communicator& comm, const DoomedDevice& doomed, const Device& device, bool for_ever) {
  const MoeLayerOptions options{.hidden = 64,
                                .intermediate = 64,
                                .router = RouterOptions::mixtral(8, 2),
                                .sizing = Sizing::bounded(8 * 64),
                                .mover = MoverKind::peer};
  const auto placement = ExpertPlacement::contiguous(8, comm.size());
  MoeLayer layer(comm, placement, options, device);
  const auto weights =
      MoeParameters::random(options, placement, comm.rank(), 1, Biases::none, device);
  MoeParameters gradients(options, placement, comm.rank(), Biases::none, device);
  Tensor tokens({32, 64}, Dtype::f32);
  for (int i = 0; i < 32 * 64; ++i) {
    tokens.span<float>()[static_cast<std::size_t>(i)] = static_cast<float>(i % 37) / 37.0F - 0.5F;
  }
  const Tensor x = device.copy_of(tokens);
  Tensor y = device.empty({32, 64}, Dtype::f32);
  Tensor d_x = device.empty({32, 64}, Dtype::f32);
  for (int step = 0; for_ever || step < 2 * kSoundSteps; ++step) {
    if (step == kSoundSteps && comm.rank() == kVictim) doomed.doom();
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x}, y, &saved);
    layer.backward(weights.weights(), saved, x, {.d_x = d_x, .gradients = gradients.views()});
    layer.check();
  }
  device.synchronize();
  layer.check();
}

}  // namespace

int main(int /*argc*/, char** argv) {
  const std::filesystem::path folder = argv[1];
  const std::string scenario = argv[2];
  const auto comm =
      connect({.backend = "mpi", .timeout = std::chrono::milliseconds(std::atoi(argv[4]))});
  write_pid(folder, comm->rank(), ::getpid());
  write_what_happens(folder, *comm, [&] {
    const Device base = std::string(argv[5]) == "cuda" ? Device::cuda() : Device();
    const auto doomed = std::make_shared<const DoomedDevice>(base, scenario, argv[3]);
    train(*comm, *doomed, Device(doomed), scenario != "none");
    return "no error";
  });
  return 0;
}
