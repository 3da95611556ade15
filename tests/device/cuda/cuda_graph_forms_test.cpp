// SPDX-License-Identifier: Apache-2.0
// Graphs of every kind of layer, and of several layers, at one rank.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "device/cuda/layer_forms.h"

namespace switchyard::testing::cuda_graph_forms_test {
namespace {

using Parameter = std::tuple<Form, Dtype>;

class CudaGraphForms : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (const auto reason = reason_for_no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  }
  static MoeLayerOptions options() {
    return options_of(std::get<0>(GetParam()), std::get<1>(GetParam()), 1);
  }
};

TEST_P(CudaGraphForms, ReplayedWithOtherRoutingsEqualsEager) {
  on_gpu_ranks(1, [&](Communicator& comm, const Device& device) {
    expect_form_replays(std::get<0>(GetParam()), options(), device, comm);
  });
}

TEST_P(CudaGraphForms, TwoLayersInOneGraphEqualEager) {
  on_gpu_ranks(1, [&](Communicator& comm, const Device& device) {
    expect_two_layers_equal_eager(options(), device, comm);
  });
}

INSTANTIATE_TEST_SUITE_P(CudaGraph, CudaGraphForms,
                         ::testing::Combine(::testing::ValuesIn(all_forms()),
                                            ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& param) {
                           return std::get<0>(param.param).name + "_" +
                                  std::string(name_of(std::get<1>(param.param)));
                         });

}  // namespace
}  // namespace switchyard::testing::cuda_graph_forms_test
