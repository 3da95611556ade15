// switchyard bench layer --device cuda: the layer on one GPU, beside what that GPU reaches.
#pragma once

#include "bench/bench_layer.h"

namespace switchyard::cli {

void bench_layer_gpu(const BenchLayerOptions& options);

}  // namespace switchyard::cli
