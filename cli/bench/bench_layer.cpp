// SPDX-License-Identifier: Apache-2.0
// switchyard bench layer, on CPUs.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/cpu_ceiling.h"
#include "bench/random_rows.h"
#include "bench/timing.h"
#include "progress.h"

namespace switchyard::cli {

MoeLayerOptions layer_options(const BenchLayerOptions& o, const Sizing& bounded) {
  return {
      .hidden = o.hidden,
      .intermediate = o.intermediate,
      .router = RouterOptions::mixtral(o.num_experts, o.top_k),
      .dtype = o.dtype,
      .weight_stage = o.weight_stage,
      .losses = o.losses ? LossOptions{.balance = BalanceLoss::batch, .z = true} : LossOptions{},
      .sizing = o.sizing == BenchSizing::bounded ? bounded : Sizing::exact(),
      .keep = o.keep};
}

namespace {

// Results over all ranks. Times are the best of all rounds.
struct LayerResult {
  double forward = 1e30;
  double forward_backward = 1e30;
  double ceiling = 0.0;                           // GFLOP/s
  std::vector<LayerStats::Stage> forward_stages;  // in the best round, mean over ranks
  std::vector<LayerStats::Stage> backward_stages;
  std::int64_t activation_bytes = 0;
  std::int64_t bytes_on_wire = 0;
};

class LayerBench {
 public:
  LayerBench(Communicator& comm, const BenchLayerOptions& options, int threads)
      : comm_(comm),
        o_(options),
        placement_(ExpertPlacement::contiguous(options.num_experts, comm.size())),
        device_(make_device(comm, threads)),
        layer_(comm, placement_, layer_options(options, Sizing::bounded(worst_rows())), device_),
        weights_(MoeParameters::random(layer_.options(), placement_, comm.rank(), 1)),
        gradients_(layer_.options(), placement_, comm.rank()),
        ceiling_({options.dtype, threads, comm.rank() * threads}) {
    const auto tokens =
        o_.num_tokens * (comm.rank() + 1) / comm.size() - o_.num_tokens * comm.rank() / comm.size();
    const auto seed = static_cast<std::uint64_t>(comm.rank());
    x_ = random_rows({tokens, o_.hidden}, o_.dtype, seed);
    d_y_ = random_rows({tokens, o_.hidden}, o_.dtype, seed + 1000);
    y_ = Tensor::zeros({tokens, o_.hidden}, o_.dtype);
    d_x_ = Tensor::zeros({tokens, o_.hidden}, o_.dtype);
    if (o_.routing != RoutingKind::router) {
      ids_ = make_local_routing(comm, {.kind = o_.routing,
                                       .num_tokens = o_.num_tokens,
                                       .top_k = o_.top_k,
                                       .num_experts = o_.num_experts});
    }
  }

  LayerResult run() {
    LayerResult result;
    train();  // warms up the caches and the memory that the device keeps
    for (int i = 0; i < o_.repeat; ++i) {
      show_progress(comm_, fmt::format("round {} of {} …", i + 1, o_.repeat));
      result.forward = std::min(result.forward, timed(comm_, [&] { infer(); }));
      const double seconds = timed(comm_, [&] { train(); });
      if (seconds < result.forward_backward) {
        result.forward_backward = seconds;
        result.forward_stages = layer_.stats().forward;
        result.backward_stages = layer_.stats().backward;
      }
      if (!has_gemm_ceiling()) continue;
      result.ceiling = std::max({result.ceiling, ceiling_.independent(comm_),
                                 comm_.backend() == "threads" ? ceiling_.threaded(comm_) : 0.0});
    }
    show_progress(comm_, "");
    average(result.forward_stages);
    average(result.backward_stages);
    result.activation_bytes = sum(activation_bytes_);
    result.bytes_on_wire = sum(layer_.stats().bytes_on_wire);
    return result;
  }

 private:
  static Device make_device(const Communicator& comm, int threads) {
    std::vector<int> cores;
    for (int i = 0; i < threads; ++i) cores.push_back(core_of(comm.rank() * threads + i));
    return Device::cpu({.num_threads = threads, .cores = cores});
  }

  // All picks of all ranks could go to one rank.
  std::int64_t worst_rows() const { return o_.num_tokens * o_.top_k; }

  LayerInput input() const {
    LayerInput in{.x = x_};
    if (ids_) in.expert_ids = *ids_;
    return in;
  }
  void infer() { layer_.forward(weights_.weights(), input(), y_, nullptr); }
  void train() {
    SavedForBackward saved;
    layer_.forward(weights_.weights(), input(), y_, &saved);
    activation_bytes_ = saved.bytes();
    const RouterLosses d_losses =
        o_.losses ? RouterLosses{.balance = 0.01F, .z = 0.001F} : RouterLosses{};
    layer_.backward(weights_.weights(), saved, {.d_y = d_y_, .d_losses = d_losses},
                    {.d_x = d_x_, .gradients = gradients_.views()});
  }

  std::int64_t sum(std::int64_t value) {
    Tensor total = Tensor::from<std::int64_t>({1}, {value});
    comm_.all_reduce(total);
    return total.span<std::int64_t>()[0];
  }
  void average(std::vector<LayerStats::Stage>& stages) {
    for (auto& stage : stages) {
      Tensor total = Tensor::from<float>({1}, {static_cast<float>(stage.seconds)});
      comm_.all_reduce(total);
      stage.seconds = static_cast<double>(total.span<float>()[0]) / comm_.size();
    }
  }

  Communicator& comm_;
  const BenchLayerOptions& o_;
  ExpertPlacement placement_;
  Device device_;
  MoeLayer layer_;
  MoeParameters weights_, gradients_;
  GemmCeiling ceiling_;
  Tensor x_, y_, d_x_, d_y_;
  std::optional<Tensor> ids_;
  std::int64_t activation_bytes_ = 0;
};

double gigaflop(const BenchLayerOptions& o, double products) {
  return 2.0 * products * static_cast<double>(o.num_tokens * o.top_k) *
         static_cast<double>(o.hidden * o.intermediate) * 1e-9;
}

// Milliseconds by direction and stage.
nlohmann::ordered_json stages_json(const LayerResult& r) {
  nlohmann::ordered_json json;
  for (const auto& stage : r.forward_stages) json["forward"][stage.name] = stage.seconds * 1e3;
  for (const auto& stage : r.backward_stages) json["backward"][stage.name] = stage.seconds * 1e3;
  return json;
}

double time_outside_gemm(const LayerResult& r) {
  double seconds = 0.0;
  for (const auto* stages : {&r.forward_stages, &r.backward_stages}) {
    for (const auto& stage : *stages) seconds += stage.name == "experts" ? 0.0 : stage.seconds;
  }
  return seconds;
}

void print_json(const BenchLayerOptions& o, const LayerResult& r, const Communicator& comm,
                int threads) {
  const double achieved = gigaflop(o, 9.0) / r.forward_backward;
  const nlohmann::ordered_json line = {
      {"shape", o.shape_name},
      {"num_tokens", o.num_tokens},
      {"hidden", o.hidden},
      {"intermediate", o.intermediate},
      {"num_experts", o.num_experts},
      {"top_k", o.top_k},
      {"dtype", name_of(o.dtype)},
      {"ranks", comm.size()},
      {"threads", threads},
      {"comm", comm.backend()},
      {"ms_forward", r.forward * 1e3},
      {"ms_forward_backward", r.forward_backward * 1e3},
      {"gflops_forward", gigaflop(o, 3.0) / r.forward},
      {"gflops_forward_backward", achieved},
      {"ceiling_gflops", r.ceiling},
      {"fraction_of_ceiling", r.ceiling > 0.0 ? achieved / r.ceiling : 0.0},
      {"fraction_outside_gemm", time_outside_gemm(r) / r.forward_backward},
      {"host_syncs_forward", 0},  // there is no device to wait for
      {"host_syncs_backward", 0},
      {"activation_bytes_per_token",
       static_cast<double>(r.activation_bytes) / static_cast<double>(o.num_tokens)},
      {"bytes_on_wire", r.bytes_on_wire},
      {"stages", stages_json(r)}};
  fmt::print("{}\n", line.dump());
}

void print_stages(std::string_view title, const std::vector<LayerStats::Stage>& stages,
                  double total) {
  fmt::print("\n{}\n", title);
  for (const auto& stage : stages) {
    fmt::print("  {:<18} {:>9.3f} ms {:>5.1f}%\n", stage.name, stage.seconds * 1e3,
               stage.seconds / total * 100.0);
  }
}

void print_table(const BenchLayerOptions& o, const LayerResult& r, const Communicator& comm,
                 int threads) {
  fmt::print(
      "{}: {} tokens, H {}, I {}, {} experts, {} picks, {}; {} ranks x {} threads over {}\n\n",
      o.shape_name, o.num_tokens, o.hidden, o.intermediate, o.num_experts, o.top_k,
      name_of(o.dtype), comm.size(), threads, comm.backend());
  const auto line = [&](std::string_view name, double seconds, double work) {
    fmt::print("{:<18} {:>9.2f} ms {:>9.1f} GFLOP/s", name, seconds * 1e3, work / seconds);
    if (r.ceiling > 0.0) {
      fmt::print(" {:>5.1f}% of the ceiling", work / seconds / r.ceiling * 100.0);
    }
    fmt::print("\n");
  };
  line("forward", r.forward, gigaflop(o, 3.0));
  line("forward+backward", r.forward_backward, gigaflop(o, 9.0));
  if (r.ceiling > 0.0) {
    fmt::print("{:<18} {:>12} {:>9.1f} GFLOP/s: 2048^3 products by the matrix library alone\n",
               "GEMM ceiling", "", r.ceiling);
  } else {
    fmt::print("No GEMM ceiling: this build has no oneDNN\n");
  }
  print_stages("forward, of forward+backward", r.forward_stages, r.forward_backward);
  print_stages("backward", r.backward_stages, r.forward_backward);
  fmt::print(
      "\nTime outside the experts' products: {:.1f}%. Kept for backward: {:.0f} bytes per token. "
      "Sent between ranks: {:.2f} MB. Best of {} rounds.\n",
      time_outside_gemm(r) / r.forward_backward * 100.0,
      static_cast<double>(r.activation_bytes) / static_cast<double>(o.num_tokens),
      static_cast<double>(r.bytes_on_wire) * 1e-6, o.repeat);
}

}  // namespace

void bench_layer(const BenchLayerOptions& options) {
  if (options.device.kind == DeviceKind::cuda) return bench_layer_gpu(options);
  launch(options.launch, [&](Communicator& comm) {
    const int threads =
        options.threads > 0 ? options.threads : std::max(1, num_cores() / comm.size());
    pin_to_core(comm.rank() * threads);
    show_progress(comm, "drawing weights …");
    LayerBench bench(comm, options, threads);
    const LayerResult result = bench.run();
    if (comm.rank() != 0) return;
    if (options.json) {
      print_json(options, result, comm, threads);
    } else {
      print_table(options, result, comm, threads);
    }
  });
}

}  // namespace switchyard::cli
