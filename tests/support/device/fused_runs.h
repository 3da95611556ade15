// The products of experts on a GPU: by the kernels of Hopper that do more than multiply, and in
// steps.
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

// What the weight of a row is found by.
enum class RowWeights { none, of_rows, of_assignments };

struct FusedWay {
  bool from_tokens = false;
  RowWeights weights = RowWeights::none;
  bool keeps_inner = true;    // forward
  bool has_d_weights = true;  // backward: by assignments where weights are
  int group = -1;             // it alone, as if there were no others; −1: all
};
std::ostream& operator<<(std::ostream& out, const FusedWay& way);

// [R, …], also d_weights; none: not asked for.
struct FusedResults {
  Tensor inner, activated, d_weights;
};
void expect_same_bits(const FusedResults& actual, const FusedResults& expected);

// Of a problem whose tensors lie in the GPU's memory in some way. Every run fails the test where no
// kernel took it, or where anything was written but the results of its groups.
class FusedRuns {
 public:
  FusedRuns(const Device& device, const FusedProblem& problem, const Layout& layout = {});

  FusedResults activate(FusedWay way) const;
  FusedResults activate_backward(FusedWay way) const;
  // By products and passes of their own, from rows and with the weights of rows.
  FusedResults activate_in_steps(FusedWay way) const;
  FusedResults activate_backward_in_steps(FusedWay way) const;
  // [part · groups + group]
  std::vector<ConstTensorView> weight_gradients(const GradientWay& way) const;

 private:
  struct Outputs;
  template <typename Launch>
  FusedResults run(const FusedWay& way, const Tensor& inner, const Launch& launch) const;
  cuda::Groups groups(int only) const;
  cuda::SourceRows source_rows(bool from_tokens) const;
  cuda::RowNumbers<const float> weights(RowWeights by) const;
  const float* weights_of_rows(const FusedWay& way) const;
  ApartRows place(const ConstTensorView& contents) const { return {device_, contents, layout_}; }
  // [R, …]; what was not to be written is as before.
  Tensor fetch(const ApartRows& rows, const Tensor& before, int only) const;
  Tensor fetch_numbers(const ApartRows& numbers, const FusedWay& way) const;
  bool is_run(std::int64_t row, int only) const;

  Device device_;
  const FusedProblem& problem_;
  Layout layout_;
  Tensor no_inner_, no_activated_;  // NaN
  Tensor row_offsets_, group_rows_;
  ApartRows sources_, rows_, tokens_, row_weights_, token_weights_, inner_;
  ApartMatrices gate_up_, down_;
};

// Where there are kernels of Hopper.
class CudaFusedGemm : public ::testing::Test {
 protected:
  void SetUp() override;

  Device device;
};

}  // namespace switchyard::testing
