// SPDX-License-Identifier: Apache-2.0
// The output of bench layer --device cuda.
#pragma once

#include <string>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/cool_and_hot.h"

namespace switchyard::cli {

// Results over all ranks.
struct GpuLayerResult {
  int num_ranks = 1;
  int num_gpus = 1;
  std::int64_t distinct_tokens = 0;  // over all pairs of ranks, including a rank with itself
  CoolAndHot forward = {};           // seconds
  CoolAndHot step = {};              // forward and backward
  CoolAndHot forward_replay = {};    // forward as graphs; zeros if the sizing does not allow them
  CoolAndHot replay = {};            // the step as graphs
  std::string no_graph = {};         // why capturing failed although the sizing allows it
  CoolAndHot gemm = {};              // FLOP/s
  CoolAndHot copy = {};              // bytes/s
  std::string no_gemm = {};
  std::vector<LayerStats::Stage> forward_stages = {}, backward_stages = {};
  std::int64_t syncs_forward = 0, syncs_backward = 0;  // on one rank
  std::int64_t activation_bytes = 0;
};

// Prints a table, or one JSON object.
void print_gpu_layer(const BenchLayerOptions& options, const GpuLayerResult& result);

}  // namespace switchyard::cli
