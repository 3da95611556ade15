// Small sums and products around a router's losses.
#pragma once

#include "device/device_backend.h"

namespace switchyard::cpu {

void loss_totals(const LossTotals& args);
void loss_slopes(const LossSlopes& args);
void count_picks(const RouterSums& sums, const TensorView& statistics);
void output_scales(const OutputScales& args);
void scale_by_expert(const ScaleByExpert& args);

}  // namespace switchyard::cpu
