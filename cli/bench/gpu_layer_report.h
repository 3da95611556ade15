// What bench layer --device cuda prints.
#pragma once

#include <string>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/cool_and_hot.h"

namespace switchyard::cli {

// Over all ranks.
struct GpuLayerResult {
  int num_ranks = 1;
  int num_gpus = 1;
  std::int64_t distinct_tokens = 0;  // over all pairs of ranks, a rank with itself among them
  CoolAndHot forward = {};           // seconds
  CoolAndHot step = {};              // forward and backward
  CoolAndHot forward_replay = {};    // as graphs; zeros where sizing does not allow them
  CoolAndHot replay = {};            // the step
  std::string no_graph = {};         // why there are none although it does
  CoolAndHot gemm = {};              // FLOP/s
  CoolAndHot copy = {};              // bytes/s
  std::string no_gemm = {};
  std::vector<LayerStats::Stage> forward_stages = {}, backward_stages = {};
  std::int64_t syncs_forward = 0, syncs_backward = 0;  // of one rank
  std::int64_t activation_bytes = 0;
};

// A table, or an object.
void print_gpu_layer(const BenchLayerOptions& options, const GpuLayerResult& result);

}  // namespace switchyard::cli
