// SPDX-License-Identifier: Apache-2.0
// Counts what CUDA itself is asked to wait for, beside what the device says it waited for.
#include <cupti.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "support/device/devices.h"
#include "support/random.h"
#include "switchyard/communicator.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::cuda_syncs_test {
namespace {

// Every call of the runtime that may wait for a GPU, whatever version of it.
bool waits(std::string_view call) {
  call = call.substr(0, call.find('_'));
  for (const std::string_view name :
       {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaThreadSynchronize",
        "cudaEventSynchronize", "cudaStreamQuery", "cudaEventQuery", "cudaMalloc", "cudaFree",
        "cudaMallocHost", "cudaFreeHost", "cudaHostAlloc", "cudaHostRegister", "cudaMallocManaged",
        "cudaMallocPitch", "cudaMalloc3D", "cudaMallocArray"}) {
    if (call == name) return true;
  }
  const bool copies = call.starts_with("cudaMemcpy") || call.starts_with("cudaMemset");
  return copies && call.find("Async") == std::string_view::npos;
}

// Sees every call of CUDA's runtime in this process, through CUPTI.
class Interposer {
 public:
  Interposer() {
    void* library = nullptr;
    for (const char* name : {"libcupti.so.13", "libcupti.so.12", "libcupti.so"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW);
    }
    if (library == nullptr) {
      reason_ = "libcupti was not found";
      return;
    }
    const auto subscribe =
        reinterpret_cast<decltype(&cuptiSubscribe)>(dlsym(library, "cuptiSubscribe"));
    const auto enable =
        reinterpret_cast<decltype(&cuptiEnableDomain)>(dlsym(library, "cuptiEnableDomain"));
    unsubscribe_ =
        reinterpret_cast<decltype(&cuptiUnsubscribe)>(dlsym(library, "cuptiUnsubscribe"));
    if (subscribe == nullptr || enable == nullptr || unsubscribe_ == nullptr ||
        subscribe(&subscriber_, &Interposer::see, this) != CUPTI_SUCCESS ||
        enable(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API) != CUPTI_SUCCESS) {
      reason_ = "CUPTI could not be used: is a profiler or a sanitizer running?";
    }
  }
  ~Interposer() {
    if (reason_.empty()) unsubscribe_(subscriber_);
  }
  Interposer(const Interposer&) = delete;
  Interposer& operator=(const Interposer&) = delete;

  const std::string& reason() const { return reason_; }
  std::int64_t calls() const { return calls_; }
  std::int64_t waits_seen() const { return waits_seen_; }
  const std::string& last_wait() const { return last_wait_; }

 private:
  static void CUPTIAPI see(void* self, CUpti_CallbackDomain /*domain*/, CUpti_CallbackId /*id*/,
                           const void* data) {
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (call.callbackSite != CUPTI_API_ENTER) return;
    auto& interposer = *static_cast<Interposer*>(self);
    ++interposer.calls_;
    if (!waits(call.functionName)) return;
    ++interposer.waits_seen_;
    interposer.last_wait_ = call.functionName;
  }

  CUpti_SubscriberHandle subscriber_ = nullptr;
  decltype(&cuptiUnsubscribe) unsubscribe_ = nullptr;
  std::string reason_;
  std::int64_t calls_ = 0;
  std::int64_t waits_seen_ = 0;
  std::string last_wait_;
};

// Experts without biases may read their rows from tokens; others have them dispatched.
class CudaSyncsTest : public ::testing::TestWithParam<std::tuple<bool, Biases>> {};

TEST_P(CudaSyncsTest, TheDeviceCountsWhatCudaSees) {
  if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  const Interposer interposer;
  if (!interposer.reason().empty()) GTEST_SKIP() << interposer.reason();
  const auto [bounded, biases] = GetParam();
  const Device device = Device::cuda(cuda_options());
  const auto comm = connect();
  const auto placement = ExpertPlacement::contiguous(8, 1);
  const MoeLayerOptions options{.hidden = 64,
                                .intermediate = 128,
                                .router = RouterOptions::deepseek_v3(8, 2),
                                .dtype = Dtype::bf16,
                                .shared_intermediate = 64,
                                .losses = {.balance = BalanceLoss::batch, .z = true},
                                .capacity = {.factor = 1.5},
                                .gradient_scale = GradientScale::global,
                                .sizing = bounded ? Sizing::bounded(400) : Sizing::exact()};
  MoeLayer layer(*comm, placement, options, device);
  const auto weights = MoeParameters::random(options, placement, 0, 1, biases, device);
  MoeParameters gradients(options, placement, 0, biases, device);
  const Tensor x = device.copy_of(Random(1).tensor({200, 64}, Dtype::bf16));
  const Tensor valid =
      device.copy_of(Tensor::from<std::int32_t>({200}, std::vector<std::int32_t>(200, 1)));
  Tensor y = device.empty({200, 64}, Dtype::bf16);
  Tensor d_x = device.empty({200, 64}, Dtype::bf16);
  for (int round = 0; round < 3; ++round) {  // the first takes memory
    const auto calls = interposer.calls();
    auto seen = interposer.waits_seen();
    auto counted = device.host_syncs();
    SavedForBackward saved;
    layer.forward(weights.weights(), {.x = x, .valid = valid}, y, &saved);
    const auto seen_forward = interposer.waits_seen() - seen;
    const auto counted_forward = device.host_syncs() - counted;
    seen = interposer.waits_seen();
    counted = device.host_syncs();
    layer.backward(weights.weights(), saved, {.d_y = x, .d_losses = {0.1F, 0.1F}},
                   {.d_x = d_x, .gradients = gradients.views()});
    EXPECT_GT(interposer.calls(), calls + 10) << "the interposer sees nothing";
    if (round == 0) continue;
    EXPECT_EQ(seen_forward, counted_forward) << interposer.last_wait();
    EXPECT_EQ(counted_forward, bounded ? 0 : 1);
    EXPECT_EQ(interposer.waits_seen() - seen, 0) << interposer.last_wait();
    EXPECT_EQ(device.host_syncs() - counted, 0);
  }
  // Functions that fetch results wait, and are counted.
  const auto seen = interposer.waits_seen();
  const auto counted = device.host_syncs();
  layer.check();
  layer.pick_counts();
  device.to_host(y);
  EXPECT_EQ(interposer.waits_seen() - seen, device.host_syncs() - counted)
      << interposer.last_wait();
  EXPECT_GT(device.host_syncs(), counted);
}

INSTANTIATE_TEST_SUITE_P(CudaSyncs, CudaSyncsTest,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Biases::none, Biases::all)),
                         [](const auto& param) {
                           const bool bounded = std::get<0>(param.param);
                           const bool has_biases = std::get<1>(param.param) == Biases::all;
                           return std::string(bounded ? "bounded" : "exact") +
                                  (has_biases ? "_with_biases" : "");
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_syncs_test
