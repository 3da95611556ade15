// switchyard bench layer --device cuda.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/gpu_ceiling.h"
#include "bench/random_rows.h"
#include "device_choice.h"
#include "progress.h"
#include "switchyard/build_info.h"
#include "switchyard/captured_graph.h"

namespace switchyard::cli {
namespace {

struct GpuResult {
  CoolAndHot forward;  // seconds
  CoolAndHot step;     // forward and backward
  CoolAndHot replay;   // the same as a graph; zeros where sizing does not allow it
  CoolAndHot gemm;     // FLOP/s
  CoolAndHot copy;     // bytes/s
  std::string no_gemm;
  std::vector<LayerStats::Stage> forward_stages, backward_stages;
  std::int64_t syncs_forward = 0, syncs_backward = 0;
  std::int64_t activation_bytes = 0;
};

class GpuLayerBench {
 public:
  GpuLayerBench(Communicator& comm, const BenchLayerOptions& o)
      : comm_(comm),
        o_(o),
        device_(o.device.make()),
        stream_(device_.stream().handle),
        timing_device_(timing_device()),
        placement_(ExpertPlacement::contiguous(o.num_experts, 1)),
        layer_(comm, placement_, layer_options(o, o.num_tokens * o.top_k), device_),
        timed_layer_(comm, placement_, layer_.options(), timing_device_),
        weights_(MoeParameters::random(layer_.options(), placement_, 0, 1, Biases::none, device_)),
        gradients_(layer_.options(), placement_, 0, Biases::none, device_),
        x_(device_.copy_of(random_rows({o.num_tokens, o.hidden}, o.dtype, 0))),
        d_y_(device_.copy_of(random_rows({o.num_tokens, o.hidden}, o.dtype, 1000))),
        y_(device_.empty(x_.shape(), o.dtype)),
        d_x_(device_.empty(x_.shape(), o.dtype)) {
    if (o.routing == RoutingKind::router) return;
    ids_ = device_.copy_of(make_local_routing(comm, {.kind = o.routing,
                                                     .num_tokens = o.num_tokens,
                                                     .top_k = o.top_k,
                                                     .num_experts = o.num_experts}));
  }

  GpuResult run() {
    GpuResult r;
    count_syncs(r);
    const auto stage = [&](std::string_view text) { show_progress(comm_, text); };
    stage("the layer …");
    r.forward = time_on_gpu(stream_, [&] { infer(layer_); });
    r.step = time_on_gpu(stream_, [&] { train(layer_); });
    if (o_.sizing == BenchSizing::bounded) {
      const CapturedGraph graph(device_, [&] { train(layer_); });
      r.replay = time_on_gpu(stream_, [&] { graph.replay(); });
    }
    stage("its stages …");
    for (int i = 0; i < o_.repeat; ++i) train(timed_layer_);
    r.forward_stages = timed_layer_.stats().forward;
    r.backward_stages = timed_layer_.stats().backward;
    stage("ceilings …");
    r.copy = copy_ceiling(stream_);
    r.gemm = gemm_ceiling(stream_,
                          {.m = o_.num_tokens * o_.top_k,
                           .n = 2 * o_.intermediate,
                           .k = o_.hidden,
                           .dtype = o_.dtype},
                          r.no_gemm);
    stage("");
    return r;
  }

 private:
  // On the same stream.
  Device timing_device() const {
    CudaOptions options = o_.device.cuda();
    options.stream = {stream_};
    options.time_stages = true;
    return Device::cuda(options);
  }
  LayerInput input() const {
    LayerInput in{.x = x_};
    if (ids_) in.expert_ids = *ids_;
    return in;
  }
  void infer(MoeLayer& layer) { layer.forward(weights_.weights(), input(), y_, nullptr); }
  void train(MoeLayer& layer) {
    SavedForBackward saved;
    layer.forward(weights_.weights(), input(), y_, &saved);
    backward(layer, saved);
  }
  void backward(MoeLayer& layer, SavedForBackward& saved) {
    const RouterLosses d_losses =
        o_.losses ? RouterLosses{.balance = 0.01F, .z = 0.001F} : RouterLosses{};
    layer.backward(weights_.weights(), saved, {.d_y = d_y_, .d_losses = d_losses},
                   {.d_x = d_x_, .gradients = gradients_.views()});
  }
  void count_syncs(GpuResult& r) {
    train(layer_);  // fills the memory that is kept
    SavedForBackward saved;
    auto before = device_.host_syncs();
    layer_.forward(weights_.weights(), input(), y_, &saved);
    r.syncs_forward = device_.host_syncs() - before;
    r.activation_bytes = saved.bytes();
    before = device_.host_syncs();
    backward(layer_, saved);
    r.syncs_backward = device_.host_syncs() - before;
    layer_.check();
  }

  Communicator& comm_;
  const BenchLayerOptions& o_;
  Device device_;
  void* stream_;
  Device timing_device_;
  ExpertPlacement placement_;
  MoeLayer layer_, timed_layer_;
  MoeParameters weights_, gradients_;
  Tensor x_, d_y_, y_, d_x_;
  std::optional<Tensor> ids_;
};

bool has_portable_kernels(const BenchLayerOptions& o) {
  return o.device.cuda().kernels == CudaKernels::portable;
}

double flop(const BenchLayerOptions& o, double products) {
  return 2.0 * products * static_cast<double>(o.num_tokens * o.top_k) *
         static_cast<double>(o.hidden * o.intermediate);
}

// The bytes that a stage must move; 0 for stages that are bound by arithmetic.
double bytes_of(const BenchLayerOptions& o, std::string_view stage) {
  const auto row = static_cast<double>(o.hidden * size_of(o.dtype));
  const auto tokens = static_cast<double>(o.num_tokens);
  const auto rows = tokens * static_cast<double>(o.top_k);
  const bool moves = stage == "dispatch" || stage == "combine" || stage == "combine_backward" ||
                     stage == "dispatch_again" || stage == "dispatch_backward";
  return moves ? (tokens + rows) * row : 0.0;
}

nlohmann::ordered_json both(const CoolAndHot& v, double scale) {
  return {{"cool", v.cool * scale}, {"hot", v.hot * scale}};
}

nlohmann::ordered_json stages_json(const BenchLayerOptions& o, const GpuResult& r,
                                   const std::vector<LayerStats::Stage>& stages) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& stage : stages) {
    nlohmann::ordered_json entry{{"stage", stage.name}, {"ms", stage.seconds * 1e3}};
    if (const double bytes = bytes_of(o, stage.name); bytes > 0.0) {
      entry["fraction_of_copy"] = bytes / stage.seconds / r.copy.cool;
    }
    json.push_back(entry);
  }
  return json;
}

void print_json(const BenchLayerOptions& o, const GpuResult& r) {
  const auto rate = [&](double products, const CoolAndHot& s) {
    return both({flop(o, products) / s.cool, flop(o, products) / s.hot}, 1e-12);
  };
  nlohmann::ordered_json line{
      {"shape", o.shape_name},
      {"num_tokens", o.num_tokens},
      {"hidden", o.hidden},
      {"intermediate", o.intermediate},
      {"num_experts", o.num_experts},
      {"top_k", o.top_k},
      {"dtype", name_of(o.dtype)},
      {"device", "cuda"},
      {"gpu", devices().back().detail},
      {"kernels", has_portable_kernels(o) ? "portable" : "best"},
      {"sizing", o.sizing == BenchSizing::bounded ? "bounded" : "exact"},
      {"ms_forward", both(r.forward, 1e3)},
      {"ms_forward_backward", both(r.step, 1e3)},
      {"tflops_forward", rate(3.0, r.forward)},
      {"tflops_forward_backward", rate(9.0, r.step)},
      {"gemm_ceiling_tflops", both(r.gemm, 1e-12)},
      {"copy_ceiling_gb_s", both(r.copy, 1e-9)},
      {"host_syncs_forward", r.syncs_forward},
      {"host_syncs_backward", r.syncs_backward},
      {"activation_bytes_per_token",
       static_cast<double>(r.activation_bytes) / static_cast<double>(o.num_tokens)},
      {"stages_forward", stages_json(o, r, r.forward_stages)},
      {"stages_backward", stages_json(o, r, r.backward_stages)}};
  if (r.replay.cool > 0.0) {
    line["ms_replayed"] = both(r.replay, 1e3);
    line["tflops_replayed"] = rate(9.0, r.replay);
  }
  fmt::print("{}\n", line.dump());
}

void print_stages(const BenchLayerOptions& o, const GpuResult& r, std::string_view title,
                  const std::vector<LayerStats::Stage>& stages) {
  fmt::print("\n{}\n", title);
  for (const auto& stage : stages) {
    fmt::print("  {:<18} {:>9.3f} ms", stage.name, stage.seconds * 1e3);
    if (const double bytes = bytes_of(o, stage.name); bytes > 0.0) {
      fmt::print(" {:>5.0f} GB/s, {:.0f}% of a copy", bytes / stage.seconds * 1e-9,
                 bytes / stage.seconds / r.copy.cool * 100.0);
    }
    fmt::print("\n");
  }
}

void print_table(const BenchLayerOptions& o, const GpuResult& r) {
  fmt::print("{}: {} tokens, H {}, I {}, {} experts, {} picks, {}, {} sizing, on {}{}\n\n",
             o.shape_name, o.num_tokens, o.hidden, o.intermediate, o.num_experts, o.top_k,
             name_of(o.dtype), o.sizing == BenchSizing::bounded ? "bounded" : "exact",
             devices().back().detail, has_portable_kernels(o) ? ", by portable kernels" : "");
  fmt::print("{:<18} {:>10} {:>10}  {:>8} {:>8}   {}\n", "", "ms cool", "ms hot", "TF cool",
             "TF hot", "of the GEMM ceiling");
  const auto line = [&](std::string_view name, const CoolAndHot& s, double products) {
    const double cool = flop(o, products) / s.cool;
    const double hot = flop(o, products) / s.hot;
    fmt::print("{:<18} {:>10.3f} {:>10.3f}  {:>8.1f} {:>8.1f}", name, s.cool * 1e3, s.hot * 1e3,
               cool * 1e-12, hot * 1e-12);
    if (r.gemm.cool > 0.0) {
      fmt::print("   {:.0f}% {:.0f}%", cool / r.gemm.cool * 100.0, hot / r.gemm.hot * 100.0);
    }
    fmt::print("\n");
  };
  line("forward", r.forward, 3.0);
  line("forward+backward", r.step, 9.0);
  if (r.replay.cool > 0.0) line("  as a graph", r.replay, 9.0);
  if (r.gemm.cool > 0.0) {
    fmt::print("{:<18} {:>10} {:>10}  {:>8.1f} {:>8.1f}   cuBLAS, [T K, H] x [H, 2 I]\n",
               "GEMM ceiling", "", "", r.gemm.cool * 1e-12, r.gemm.hot * 1e-12);
  } else {
    fmt::print("No GEMM ceiling: {}\n", r.no_gemm);
  }
  fmt::print("Copy ceiling: {:.0f} GB/s cool, {:.0f} hot, read and written\n", r.copy.cool * 1e-9,
             r.copy.hot * 1e-9);
  print_stages(o, r, "forward, of forward+backward", r.forward_stages);
  print_stages(o, r, "backward", r.backward_stages);
  fmt::print(
      "\nHost syncs: {} forward, {} backward. Kept for backward: {:.0f} bytes a token. "
      "Medians; stages of the last of {}.\n",
      r.syncs_forward, r.syncs_backward,
      static_cast<double>(r.activation_bytes) / static_cast<double>(o.num_tokens), o.repeat);
}

}  // namespace

void bench_layer_gpu(const BenchLayerOptions& options) {
  launch({.comm = "threads", .ranks = 1}, [&](Communicator& comm) {
    show_progress(comm, "drawing weights …");
    GpuLayerBench bench(comm, options);
    const GpuResult result = bench.run();
    if (options.json) {
      print_json(options, result);
    } else {
      print_table(options, result);
    }
  });
}

}  // namespace switchyard::cli
