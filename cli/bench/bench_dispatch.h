// switchyard bench dispatch: plan, dispatch, combine and their backwards beside their ceilings.
#pragma once

#include <array>
#include <cstdint>

#include "bench/routing.h"
#include "launch.h"
#include "switchyard/dispatcher.h"

namespace switchyard::cli {

struct BenchDispatchOptions {
  LaunchOptions launch;
  std::int64_t num_tokens = 8192;  // over all ranks
  std::int64_t hidden = 2048;
  int num_experts = 64;
  std::int64_t top_k = 2;
  MoverKind mover = MoverKind::automatic;
  Dtype dtype = Dtype::f32;
  RoutingKind routing = RoutingKind::uniform;
  int repeat = 20;
  bool json = false;
};

void bench_dispatch(const BenchDispatchOptions& options);

}  // namespace switchyard::cli
