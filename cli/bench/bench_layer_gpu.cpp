// SPDX-License-Identifier: Apache-2.0
// switchyard bench layer --device cuda.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/gpu_ceiling.h"
#include "bench/gpu_layer_report.h"
#include "bench/gpu_load.h"
#include "bench/random_rows.h"
#include "bench/rank_timing.h"
#include "between_ranks.h"
#include "device_choice.h"
#include "progress.h"
#include "switchyard/captured_graph.h"

namespace switchyard::cli {
namespace {

MoeLayerOptions exact_options(const BenchLayerOptions& o) {
  return layer_options(o, Sizing::exact());
}

class GpuLayerBench {
 public:
  GpuLayerBench(Communicator& comm, const BenchLayerOptions& o)
      : comm_(comm),
        o_(o),
        device_(o.device.make(comm.rank())),
        stream_(device_.stream().handle),
        timing_device_(timing_device()),
        placement_(ExpertPlacement::contiguous(o.num_experts, comm.size())),
        weights_(MoeParameters::random(exact_options(o), placement_, comm.rank(), 1, Biases::none,
                                       device_)),
        gradients_(exact_options(o), placement_, comm.rank(), Biases::none, device_),
        ids_(local_routing()),
        x_(local_rows(0)),
        d_y_(local_rows(1000)),
        y_(device_.empty(x_.shape(), o.dtype)),
        d_x_(device_.empty(x_.shape(), o.dtype)),
        load_(find_load()),
        layer_(comm, placement_, layer_options(o, load_.sizing()), device_),
        timed_layer_(comm, placement_, layer_.options(), timing_device_) {}

  GpuLayerResult run() {
    GpuLayerResult r{.num_ranks = comm_.size(),
                     .num_gpus = o_.device.num_gpus,
                     .distinct_tokens = load_.distinct_tokens};
    count_syncs(r);
    const auto stage = [&](std::string_view text) { show_progress(comm_, text); };
    stage("the layer …");
    r.forward = time(comm_, [&] { infer(layer_); });
    r.step = time(comm_, [&] { train(layer_); });
    stage("its stages …");
    for (int i = 0; i < o_.repeat; ++i) train(timed_layer_);
    r.forward_stages = mean_over_ranks(timed_layer_.stats().forward);
    r.backward_stages = mean_over_ranks(timed_layer_.stats().backward);
    stage("ceilings …");
    take_ceilings(r);
    stage("graphs …");
    if (o_.sizing == BenchSizing::bounded) {
      r.no_graph = try_on_ranks(comm_, [&](Communicator& ranks) { time_graphs(ranks, r); });
    }
    stage("");
    return r;
  }

 private:
  // Makes a device on the same stream that also times the stages.
  Device timing_device() const {
    CudaOptions options = o_.device.cuda(comm_.rank());
    options.stream = {stream_};
    options.time_stages = true;
    return Device::cuda(options);
  }
  Tensor local_rows(std::uint64_t seed) const {
    const auto rank = static_cast<std::int64_t>(comm_.rank());
    const auto tokens =
        o_.num_tokens * (rank + 1) / comm_.size() - o_.num_tokens * rank / comm_.size();
    return device_.copy_of(
        random_rows({tokens, o_.hidden}, o_.dtype, seed + static_cast<std::uint64_t>(rank)));
  }
  std::optional<Tensor> local_routing() const {
    if (o_.routing == RoutingKind::router) return std::nullopt;
    return device_.copy_of(make_local_routing(comm_, {.kind = o_.routing,
                                                      .num_tokens = o_.num_tokens,
                                                      .top_k = o_.top_k,
                                                      .num_experts = o_.num_experts}));
  }
  // Several ranks cannot each have room for the worst case, so an exact forward finds what is
  // needed.
  GpuLoad find_load() {
    if (comm_.size() == 1) return {o_.num_tokens * o_.top_k, o_.num_tokens};
    MoeLayer layer(comm_, placement_, exact_options(o_), device_);
    SavedForBackward saved;
    layer.forward(weights_.weights(), input(), y_, &saved);
    return load_of(comm_, saved.plan());
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

  CoolAndHot time(Communicator& comm, const std::function<void()>& work) {
    return comm.size() == 1 ? time_on_gpu(stream_, work) : time_on_ranks(comm, device_, work);
  }
  void count_syncs(GpuLayerResult& r) {
    train(layer_);  // warms up the memory that the device keeps
    SavedForBackward saved;
    auto before = device_.host_syncs();
    layer_.forward(weights_.weights(), input(), y_, &saved);
    r.syncs_forward = device_.host_syncs() - before;
    r.activation_bytes = reduce_number(comm_, saved.bytes());
    before = device_.host_syncs();
    backward(layer_, saved);
    r.syncs_backward = device_.host_syncs() - before;
    layer_.check();
  }
  // Every rank captures its own graph, and all ranks replay theirs together.
  void time_graphs(Communicator& ranks, GpuLayerResult& r) {
    MoeLayer layer(ranks, placement_, layer_.options(), device_);
    const auto time_graph = [&](const std::function<void()>& step) {
      step();
      const CapturedGraph graph(device_, step);
      const auto seconds = time(ranks, [&] { graph.replay(); });
      layer.check();
      return seconds;
    };
    r.forward_replay = time_graph([&] { infer(layer); });
    ranks.barrier();  // all graphs are destroyed before a rank's work waits for others on the GPU
    r.replay = time_graph([&] { train(layer); });
  }
  // Allocating may wait for the GPU, and so for other ranks, so all ranks do it at the same point.
  void take_ceilings(GpuLayerResult& r) {
    device_.synchronize();
    comm_.barrier();
    r.copy = copy_ceiling(stream_, o_.device.cuda(comm_.rank()).ordinal,
                          [&](const auto& copy) { return time(comm_, copy); }) *
             comm_.size();
    comm_.barrier();
    if (comm_.rank() == 0) {
      r.gemm = gemm_ceiling(stream_,
                            {.m = o_.num_tokens * o_.top_k,
                             .n = 2 * o_.intermediate,
                             .k = o_.hidden,
                             .dtype = o_.dtype},
                            r.no_gemm) *
               o_.device.num_gpus;
    }
    comm_.barrier();
  }
  std::vector<LayerStats::Stage> mean_over_ranks(std::vector<LayerStats::Stage> stages) {
    for (auto& stage : stages) {
      double sum = 0.0;
      for (const double seconds : gather_numbers(comm_, {stage.seconds})) sum += seconds;
      stage.seconds = sum / comm_.size();
    }
    return stages;
  }

  Communicator& comm_;
  const BenchLayerOptions& o_;
  Device device_;
  void* stream_;
  Device timing_device_;
  ExpertPlacement placement_;
  MoeParameters weights_, gradients_;
  std::optional<Tensor> ids_;
  Tensor x_, d_y_, y_, d_x_;
  GpuLoad load_;
  MoeLayer layer_, timed_layer_;
};

}  // namespace

void bench_layer_gpu(const BenchLayerOptions& options) {
  launch_on(options.device, options.launch, [&](Communicator& comm, const DeviceChoice& device) {
    BenchLayerOptions o = options;
    o.launch.ranks = comm.size();
    o.device = device;
    show_progress(comm, "drawing weights …");
    GpuLayerBench bench(comm, o);
    const GpuLayerResult result = bench.run();
    if (comm.rank() == 0) print_gpu_layer(o, result);
  });
}

}  // namespace switchyard::cli
