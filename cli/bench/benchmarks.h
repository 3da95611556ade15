// The benchmarks of `switchyard bench`, and what each is told.
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

// Plan, dispatch, combine and their backwards beside their ceilings.
void bench_dispatch(const BenchDispatchOptions& options);
// With --device cuda: beside copies within the memory of GPUs, and as graphs, too.
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

MoeLayerOptions layer_options(const BenchLayerOptions& options, const Sizing& bounded);

// The whole layer, beside the matrix library's own speed.
void bench_layer(const BenchLayerOptions& options);
// With --device cuda: beside what GPUs reach.
void bench_layer_gpu(const BenchLayerOptions& options);

struct BenchCheckpointOptions {
  LaunchOptions launch;
  std::uint64_t size = std::uint64_t{1} << 30;  // bytes of all experts, about
  std::filesystem::path folder;                 // empty: the system's for temporary files
  int repeat = 5;
  bool json = false;
};

// Saving experts and loading them again, beside plain reads of the same bytes.
void bench_checkpoint(const BenchCheckpointOptions& options);

}  // namespace switchyard::cli
