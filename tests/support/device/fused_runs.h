// SPDX-License-Identifier: Apache-2.0
// Runs the experts' products on a GPU: with Hopper's fused kernels, and in separate steps.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "support/device/apart_rows.h"
#include "support/device/devices.h"
#include "support/device/fused_problem.h"
#include "switchyard/device.h"

namespace switchyard::testing {

// How the weight of a row is indexed.
enum class RowWeights { none, of_rows, of_assignments };

struct FusedWay {
  bool from_tokens = false;
  RowWeights weights = RowWeights::none;
  bool keeps_inner = true;    // forward
  bool has_d_weights = true;  // backward: stored like the weights
  int group = -1;             // runs only this group, as if there were no others; −1: all
  bool has_tickets = false;
};
std::ostream& operator<<(std::ostream& out, const FusedWay& way);

// Each is [R, …], including d_weights; absent if not requested.
struct FusedResults {
  Tensor inner, activated, d_weights;
};
void expect_same_bits(const FusedResults& actual, const FusedResults& expected);

// Runs a problem whose tensors have a given layout in GPU memory. A run fails the test if no kernel
// accepts it, or if anything outside the results of its groups is written.
class FusedRuns {
 public:
  FusedRuns(const Device& device, const FusedProblem& problem, const Layout& layout = {});

  FusedResults activate(FusedWay way) const;
  FusedResults activate_backward(FusedWay way) const;
  // Uses separate products and passes, reading rows and the weights of rows.
  FusedResults activate_in_steps(FusedWay way) const;
  FusedResults activate_backward_in_steps(FusedWay way) const;
  // The tickets that all runs with them share, see cuda::Groups.
  Tensor tickets() const { return device_.to_host(tickets_); }
  // [part · groups + group]
  std::vector<ConstTensorView> weight_gradients(const GradientWay& way) const;

 private:
  struct Outputs;
  template <typename Launch>
  FusedResults run(const FusedWay& way, const Tensor& inner, const Launch& launch) const;
  cuda::Groups groups(int only, bool has_tickets = false) const;
  cuda::SourceRows source_rows(bool from_tokens) const;
  cuda::RowNumbers<const float> weights(RowWeights by) const;
  const float* weights_of_rows(const FusedWay& way) const;
  ApartRows place(const ConstTensorView& contents) const { return {device_, contents, layout_}; }
  // Returns [R, …]. Fails the test if anything outside the run's groups changed from `before`.
  Tensor fetch(const ApartRows& rows, const Tensor& before, int only) const;
  Tensor fetch_numbers(const ApartRows& numbers, const FusedWay& way) const;
  bool is_run(std::int64_t row, int only) const;

  Device device_;
  const FusedProblem& problem_;
  Layout layout_;
  Tensor no_inner_, no_activated_;  // NaN
  Tensor row_offsets_, group_rows_;
  mutable Tensor tickets_;  // runs write there
  ApartRows sources_, rows_, tokens_, row_weights_, token_weights_, inner_;
  ApartMatrices gate_up_, down_;
};

// Skips if there are no Hopper kernels.
class CudaFusedGemm : public ::testing::Test {
 protected:
  void SetUp() override;

  Device device;
};

}  // namespace switchyard::testing
