// SPDX-License-Identifier: Apache-2.0
// RMSNorm: y = x / rms(x) · weight, row by row.
#pragma once

#include "model/compute.h"
#include "switchyard/tensor.h"

namespace switchyard::train {

struct RmsNormForward {
  ConstTensorView x;       // [T, H]
  ConstTensorView weight;  // [H]
  TensorView y;            // out [T, H]
  TensorView inverse_rms;  // out [T]: kept for backward
};
void rms_norm(Compute& compute, const RmsNormForward& args);

struct RmsNormBackward {
  ConstTensorView x;
  ConstTensorView weight;
  ConstTensorView inverse_rms;
  ConstTensorView d_y;  // [T, H]
  TensorView d_x;       // [T, H], accumulated: it already holds the gradient of the residual
  TensorView d_weight;  // out [H]: over this rank's tokens
};
void rms_norm_backward(Compute& compute, const RmsNormBackward& args);

}  // namespace switchyard::train
