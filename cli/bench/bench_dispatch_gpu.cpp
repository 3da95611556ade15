// SPDX-License-Identifier: Apache-2.0
// switchyard bench dispatch --device cuda.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/gpu_ceiling.h"
#include "bench/gpu_load.h"
#include "bench/gpu_movement.h"
#include "bench/random_rows.h"
#include "bench/rank_timing.h"
#include "between_ranks.h"
#include "common/printable.h"
#include "device_choice.h"
#include "progress.h"
#include "switchyard/build_info.h"
#include "switchyard/captured_graph.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

// One operation and the bytes that it must move, over all ranks.
struct GpuOperation {
  std::string op;
  double floor_bytes = 0.0;  // if each token goes to a rank once
  double rows_bytes = 0.0;   // if every row is written, as a Dispatcher does
  std::function<void()> run;
  CoolAndHot seconds = {};
  std::int64_t host_syncs = 0;  // on one rank, in one call
};

struct GpuDispatchResult {
  std::vector<GpuOperation> operations;
  GpuOperation graphs;   // dispatch and combine, captured on each rank and replayed together
  std::string no_graph;  // why they were not captured; empty if they were
  CoolAndHot copy;       // bytes/s
  std::int64_t distinct_tokens = 0;
};

class GpuDispatchBench {
 public:
  GpuDispatchBench(Communicator& comm, const BenchDispatchOptions& o)
      : comm_(comm),
        o_(o),
        device_(o.device.make(comm.rank())),
        placement_(ExpertPlacement::contiguous(o.num_experts, comm.size())),
        ids_(device_.copy_of(make_local_routing(comm, {.kind = o.routing,
                                                       .num_tokens = o.num_tokens,
                                                       .top_k = o.top_k,
                                                       .num_experts = o.num_experts}))),
        load_(find_load()),
        dispatcher_(comm, placement_, dispatcher_options(load_.sizing()), device_),
        plan_(dispatcher_.plan(ids_)) {
    const auto seed = static_cast<std::uint64_t>(comm.rank());
    x_ = device_.copy_of(random_rows({ids_.rows(), o.hidden}, o.dtype, seed));
    weights_ = device_.copy_of(random_rows({ids_.rows(), o.top_k}, Dtype::f32, seed));
    y_ = device_.empty(x_.shape(), o.dtype);
    rows_ = dispatcher_.take_rows(plan_);
  }

  GpuDispatchResult run() {
    GpuDispatchResult r{.operations = operations(),
                        .graphs = both_ways("  as graphs"),
                        .no_graph = {},
                        .copy = take_copy_ceiling(),
                        .distinct_tokens = load_.distinct_tokens};
    for (GpuOperation& operation : r.operations) {
      show_progress(comm_, operation.op + " …");
      measure(comm_, operation);
    }
    plan_.check();
    show_progress(comm_, "graphs …");
    r.no_graph = try_on_ranks(comm_, [&](Communicator& ranks) { measure_graphs(ranks, r.graphs); });
    show_progress(comm_, "");
    return r;
  }

 private:
  GpuLoad find_load() {
    Dispatcher dispatcher(comm_, placement_, dispatcher_options(Sizing::exact()), device_);
    return load_of(comm_, dispatcher.plan(ids_));
  }
  DispatcherOptions dispatcher_options(const Sizing& sizing) const {
    return {.plan = {.hidden = o_.hidden, .dtype = o_.dtype, .sizing = sizing}, .mover = o_.mover};
  }

  // Dispatches like a layer whose experts read their rows from tokens. A single rank has the tokens
  // already, so it writes rows.
  void dispatch(Dispatcher& dispatcher, const Plan& plan) {
    if (comm_.size() == 1) return dispatch_rows(dispatcher, plan);
    (void)dispatcher.receive(plan, x_, weights_);
  }
  void dispatch_rows(Dispatcher& dispatcher, const Plan& plan) {
    dispatcher.dispatch(plan, {.x = x_}, {.rows = rows_});
  }
  void combine(Dispatcher& dispatcher, const Plan& plan, const TensorView& rows) {
    dispatcher.combine(plan, {.rows = rows, .weights = weights_}, y_);
  }

  // Lists the operations that write rows before those that read them.
  std::vector<GpuOperation> operations() {
    const GpuMovement m = movement();
    const auto ids = static_cast<double>(2 * o_.num_tokens * o_.top_k * size_of(Dtype::i32));
    const auto scatter = [&](const char* op, std::function<void()> run) {
      return GpuOperation{op, m.scatter_bytes(), m.scatter_rows_bytes(), std::move(run)};
    };
    const auto gather = [&](const char* op, std::function<void()> run) {
      return GpuOperation{op, m.gather_bytes(), m.gather_bytes(), std::move(run)};
    };
    auto together = both_ways("dispatch+combine");
    together.run = [this] {
      dispatch(dispatcher_, plan_);
      combine(dispatcher_, plan_, rows_);
    };
    return {
        {"plan", ids, ids, [this] { plan_ = dispatcher_.plan(ids_); }},
        scatter("dispatch", [this] { dispatch(dispatcher_, plan_); }),
        scatter("  and make rows", [this] { dispatch_rows(dispatcher_, plan_); }),
        gather("combine", [this] { combine(dispatcher_, plan_, rows_); }),
        scatter("combine_backward",
                [this] {
                  dispatcher_.combine_backward(plan_, {.d_y = x_, .weights = weights_},
                                               {.d_rows = rows_});
                }),
        gather("dispatch_backward",
               [this] { dispatcher_.dispatch_backward(plan_, {.d_rows = rows_}, {.d_x = y_}); }),
        together};
  }
  GpuOperation both_ways(const char* op) const {
    const GpuMovement m = movement();
    return {
        op, m.scatter_bytes() + m.gather_bytes(), m.scatter_rows_bytes() + m.gather_bytes(), {}};
  }
  GpuMovement movement() const {
    return {.num_tokens = o_.num_tokens,
            .top_k = o_.top_k,
            .distinct_tokens = load_.distinct_tokens,
            .row_bytes = o_.hidden * size_of(o_.dtype)};
  }

  CoolAndHot time(Communicator& comm, const std::function<void()>& work) {
    return comm.size() == 1 ? time_on_gpu(device_.stream().handle, work)
                            : time_on_ranks(comm, device_, work);
  }
  void measure(Communicator& comm, GpuOperation& operation) {
    operation.run();
    const auto before = device_.host_syncs();
    operation.run();
    operation.host_syncs = device_.host_syncs() - before;
    operation.seconds = time(comm, operation.run);
  }
  // Uses one plan for all replays.
  void measure_graphs(Communicator& ranks, GpuOperation& operation) {
    Dispatcher dispatcher(ranks, placement_, dispatcher_options(load_.sizing()), device_);
    const Plan plan = dispatcher.plan(ids_);
    const TensorView rows = dispatcher.take_rows(plan);
    const auto step = [&] {
      dispatch(dispatcher, plan);
      combine(dispatcher, plan, rows);
    };
    step();
    const Tensor expected = device_.to_host(y_);
    const CapturedGraph graph(device_, step);
    device_.set_zero(y_);
    operation.run = [&] { graph.replay(); };
    measure(ranks, operation);
    const Tensor replayed = device_.to_host(y_);
    if (std::memcmp(expected.data(), replayed.data(), static_cast<std::size_t>(expected.bytes())) !=
        0) {
      throw InternalError("graphs gave other bits than the calls they were captured from");
    }
  }
  // Allocating may wait for the GPU, and so for other ranks, so all ranks do it at the same point.
  CoolAndHot take_copy_ceiling() {
    show_progress(comm_, "copying …");
    device_.synchronize();
    comm_.barrier();
    const auto rate = copy_ceiling(device_.stream().handle, o_.device.cuda(comm_.rank()).ordinal,
                                   [&](const auto& copy) { return time(comm_, copy); });
    comm_.barrier();
    return rate * comm_.size();
  }

  Communicator& comm_;
  const BenchDispatchOptions& o_;
  Device device_;
  ExpertPlacement placement_;
  Tensor ids_;
  GpuLoad load_;
  Dispatcher dispatcher_;
  Plan plan_;
  Tensor x_, y_, weights_;
  TensorView rows_;
};

nlohmann::ordered_json cool_and_hot(const CoolAndHot& v, double scale = 1.0) {
  return {{"cool", v.cool * scale}, {"hot", v.hot * scale}};
}

// Returns the time to copy that many bytes, as a fraction of the operation's time.
CoolAndHot share(double bytes, const GpuOperation& operation, const CoolAndHot& copy) {
  return {bytes / copy.cool / operation.seconds.cool, bytes / copy.hot / operation.seconds.hot};
}

void print_json(const BenchDispatchOptions& o, const GpuDispatchResult& r) {
  const auto head = [&](const std::string& op) {
    return nlohmann::ordered_json{
        {"op", op}, {"device", "cuda"}, {"ranks", o.launch.ranks}, {"gpus", o.device.num_gpus}};
  };
  const auto print = [&](const std::string& name, const GpuOperation& m) {
    auto line = head(name);
    line["ms"] = cool_and_hot(m.seconds, 1e3);
    line["floor_bytes"] = static_cast<std::int64_t>(m.floor_bytes);
    line["floor_ms"] = cool_and_hot(m.floor_bytes / r.copy, 1e3);
    line["fraction_of_floor"] = cool_and_hot(share(m.floor_bytes, m, r.copy));
    line["rows_bytes"] = static_cast<std::int64_t>(m.rows_bytes);
    line["fraction_of_rows_floor"] = cool_and_hot(share(m.rows_bytes, m, r.copy));
    line["host_syncs"] = m.host_syncs;
    line["copy_ceiling_gb_s"] = cool_and_hot(r.copy, 1e-9);
    fmt::print("{}\n", line.dump());
  };
  for (const GpuOperation& m : r.operations) print(m.op, m);
  const std::string graphs = "dispatch+combine as graphs";
  if (r.no_graph.empty()) return print(graphs, r.graphs);
  auto line = head(graphs);
  line["not_captured"] = r.no_graph;
  fmt::print("{}\n", line.dump());
}

void print_operation(const GpuOperation& m, const CoolAndHot& copy) {
  const CoolAndHot of_floor = share(m.floor_bytes, m, copy);
  const CoolAndHot of_rows = share(m.rows_bytes, m, copy);
  fmt::print("{:<18} {:>9.4f} {:>9.4f} {:>9.4f} {:>5.0f}% {:>4.0f}% {:>5.0f}% {:>4.0f}% {:>6}\n",
             m.op, m.seconds.cool * 1e3, m.seconds.hot * 1e3, m.floor_bytes / copy.cool * 1e3,
             of_floor.cool * 100.0, of_floor.hot * 100.0, of_rows.cool * 100.0, of_rows.hot * 100.0,
             m.host_syncs);
}

void print_table(const BenchDispatchOptions& o, const GpuDispatchResult& r) {
  fmt::print("{} tokens of {} x {}, {} experts, {} picks; on {}; {} ranks, GPUs in use: {}\n\n",
             o.num_tokens, o.hidden, name_of(o.dtype), o.num_experts, o.top_k,
             devices().back().detail, o.launch.ranks, o.device.num_gpus);
  fmt::print("{:<18} {:>9} {:>9} {:>9} {:>12} {:>12} {:>6}\n", "", "ms cool", "ms hot", "floor ms",
             "of floor", "of rows", "syncs");
  for (const GpuOperation& m : r.operations) print_operation(m, r.copy);
  if (r.no_graph.empty()) {
    print_operation(r.graphs, r.copy);
  } else {
    fmt::print("  not captured: {}\n", train::printable(r.no_graph));
  }
  fmt::print(
      "\nThe floor: a token is read once and written once for each rank that it goes to ({:.2f} a "
      "token), or its\nK rows are read and one is written, as fast as a copy: {:.0f} GB/s cool, "
      "{:.0f} hot, read and written, all ranks at once.\nOf rows: the same where every row is "
      "written. Syncs: of the host of rank 0, in one call. Medians.\n",
      static_cast<double>(r.distinct_tokens) / static_cast<double>(o.num_tokens),
      r.copy.cool * 1e-9, r.copy.hot * 1e-9);
}

}  // namespace

void bench_dispatch_gpu(const BenchDispatchOptions& options) {
  launch_on(options.device, options.launch, [&](Communicator& comm, const DeviceChoice& device) {
    BenchDispatchOptions o = options;
    o.launch.ranks = comm.size();
    o.device = device;
    GpuDispatchBench bench(comm, o);
    const auto result = bench.run();
    if (comm.rank() == 0) o.json ? print_json(o, result) : print_table(o, result);
  });
}

}  // namespace switchyard::cli
