// switchyard bench layer: the whole layer, beside the matrix library's own speed.
#pragma once

#include <cstdint>
#include <string>

#include "bench/routing.h"
#include "device_choice.h"
#include "launch.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

enum class BenchSizing { exact, bounded };

struct BenchLayerOptions {
  std::string shape_name = "small";
  std::int64_t num_tokens = 4096;  // over all ranks
  std::int64_t hidden = 512;
  std::int64_t intermediate = 512;
  int num_experts = 16;
  std::int64_t top_k = 2;
  LaunchOptions launch;
  int threads = 0;  // of each rank; 0: the cores divided by the ranks
  DeviceChoice device;
  Dtype dtype = Dtype::f32;
  BenchSizing sizing = BenchSizing::exact;
  RoutingKind routing = RoutingKind::router;
  WeightStage weight_stage = MoeLayerOptions{}.weight_stage;
  Keep keep = Keep::rows;
  bool losses = false;  // balance and z, global
  int repeat = 10;
  bool json = false;
};

MoeLayerOptions layer_options(const BenchLayerOptions& options, std::int64_t capacity);

void bench_layer(const BenchLayerOptions& options);

}  // namespace switchyard::cli
