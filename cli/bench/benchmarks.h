// SPDX-License-Identifier: Apache-2.0
// The benchmarks of `switchyard bench` and their options.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "bench/routing.h"
#include "device_choice.h"
#include "launch.h"
#include "switchyard/dispatcher.h"
#include "switchyard/moe_layer.h"

namespace switchyard::cli {

struct BenchDispatchOptions {
  LaunchOptions launch;
  std::int64_t num_tokens = 8192;  // over all ranks
  std::int64_t hidden = 2048;
  int num_experts = 64;
  std::int64_t top_k = 2;
  DeviceChoice device;
  MoverKind mover = MoverKind::automatic;
  Dtype dtype = Dtype::f32;
  RoutingKind routing = RoutingKind::uniform;
  int repeat = 20;
  bool json = false;
};

// Measures plan, dispatch, combine and their backwards, and compares them with their ceilings.
void bench_dispatch(const BenchDispatchOptions& options);
// The same with --device cuda: compares with copies within GPU memory, and also measures graphs.
void bench_dispatch_gpu(const BenchDispatchOptions& options);

enum class BenchSizing { exact, bounded };

struct BenchLayerOptions {
  std::string shape_name = "small";
  std::int64_t num_tokens = 4096;  // over all ranks
  std::int64_t hidden = 512;
  std::int64_t intermediate = 512;
  int num_experts = 16;
  std::int64_t top_k = 2;
  LaunchOptions launch;
  int threads = 0;  // per rank; 0: the cores divided by the ranks
  DeviceChoice device;
  Dtype dtype = Dtype::f32;
  BenchSizing sizing = BenchSizing::exact;
  RoutingKind routing = RoutingKind::router;
  WeightStage weight_stage = MoeLayerOptions{}.weight_stage;
  Keep keep = Keep::rows;
  bool losses = false;  // the balance loss and the z-loss, global
  int repeat = 10;
  bool json = false;
};

MoeLayerOptions layer_options(const BenchLayerOptions& options, const Sizing& bounded);

// Measures the whole layer, and compares it with the matrix library's own speed.
void bench_layer(const BenchLayerOptions& options);
// The same with --device cuda: compares with the ceilings of the GPUs.
void bench_layer_gpu(const BenchLayerOptions& options);

struct BenchCheckpointOptions {
  LaunchOptions launch;
  std::uint64_t size = std::uint64_t{1} << 30;  // approximate bytes of all experts
  std::filesystem::path folder;                 // empty: the system's folder for temporary files
  int repeat = 5;
  bool json = false;
};

// Measures saving and loading experts, and compares loading with plain reads of the same bytes.
void bench_checkpoint(const BenchCheckpointOptions& options);

}  // namespace switchyard::cli
