// SPDX-License-Identifier: Apache-2.0
// switchyard bench dispatch.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/benchmarks.h"
#include "bench/cpu_ceiling.h"
#include "bench/random_rows.h"
#include "bench/timing.h"
#include "progress.h"

namespace switchyard::cli {
namespace {

// One operation, the memory pass that bounds it, and the best time of each.
struct MovementTimes {
  std::string op;
  std::int64_t bytes = 0;  // over all ranks
  std::function<void()> run;
  std::function<void()> ceiling;
  double seconds = 1e30;
  double ceiling_seconds = 1e30;
  std::int64_t bytes_on_wire = 0;
};

class DispatchBench {
 public:
  DispatchBench(Communicator& comm, const BenchDispatchOptions& options)
      : comm_(comm),
        options_(options),
        dispatcher_(comm, ExpertPlacement::contiguous(options.num_experts, comm.size()),
                    dispatcher_options(options)),
        ids_(make_local_routing(comm, {.kind = options.routing,
                                       .num_tokens = options.num_tokens,
                                       .top_k = options.top_k,
                                       .num_experts = options.num_experts})),
        plan_(dispatcher_.plan(ids_)) {
    const auto tokens = plan_.num_tokens();
    const auto seed = static_cast<std::uint64_t>(comm.rank());
    x_ = random_rows({tokens, options.hidden}, options.dtype, seed);
    y_ = random_rows({tokens, options.hidden}, options.dtype, seed);
    weights_ = random_rows({tokens, options.top_k}, Dtype::f32, seed);
    rows_ = random_rows({plan_.row_capacity(), options.hidden}, options.dtype, seed);
    streams_ = random_rows({tokens * options.top_k, options.hidden}, options.dtype, seed);
    slots_ = Tensor({tokens, options.top_k}, Dtype::i32);
  }

  std::vector<MovementTimes> run() {
    auto all = measurements();
    for (int i = 0; i < options_.repeat; ++i) {
      show_progress(comm_, fmt::format("round {} of {} …", i + 1, options_.repeat));
      for (MovementTimes& m : all) {
        const auto before = dispatcher_.bytes_on_wire();
        m.seconds = std::min(m.seconds, timed(comm_, m.run));
        m.bytes_on_wire = dispatcher_.bytes_on_wire() - before;
        m.ceiling_seconds = std::min(m.ceiling_seconds, timed(comm_, m.ceiling));
      }
    }
    show_progress(comm_, "");
    for (MovementTimes& m : all) {
      Tensor wire = Tensor::from<std::int64_t>({1}, {m.bytes_on_wire});
      comm_.all_reduce(wire);
      m.bytes_on_wire = wire.span<std::int64_t>()[0];
    }
    return all;
  }

  MoverKind mover() const { return dispatcher_.mover(); }

 private:
  static DispatcherOptions dispatcher_options(const BenchDispatchOptions& options) {
    return {.plan = {.hidden = options.hidden, .dtype = options.dtype}, .mover = options.mover};
  }

  std::vector<MovementTimes> measurements() {
    const auto row_bytes = options_.hidden * size_of(options_.dtype);
    const auto bytes = (1 + options_.top_k) * options_.num_tokens * row_bytes;
    const auto spread = [this] { one_read_many_writes(x_, streams_, options_.top_k); };
    const auto collect = [this] { many_reads_one_write(streams_, y_, options_.top_k); };
    return {
        {.op = "plan",
         .bytes = 2 * options_.num_tokens * options_.top_k * 4,
         .run = [this] { plan_ = dispatcher_.plan(ids_); },
         .ceiling = [this] { one_read_many_writes(ids_, slots_, 1); }},
        {.op = "dispatch",
         .bytes = bytes,
         .run = [this] { dispatcher_.dispatch(plan_, {.x = x_}, {.rows = rows_}); },
         .ceiling = spread},
        {.op = "combine",
         .bytes = bytes,
         .run = [this] { dispatcher_.combine(plan_, {.rows = rows_, .weights = weights_}, y_); },
         .ceiling = collect},
        {.op = "combine_backward",
         .bytes = bytes,
         .run =
             [this] {
               dispatcher_.combine_backward(plan_, {.d_y = x_, .weights = weights_},
                                            {.d_rows = rows_});
             },
         .ceiling = spread},
        {.op = "dispatch_backward",
         .bytes = bytes,
         .run = [this] { dispatcher_.dispatch_backward(plan_, {.d_rows = rows_}, {.d_x = y_}); },
         .ceiling = collect},
    };
  }

  Communicator& comm_;
  const BenchDispatchOptions& options_;
  Dispatcher dispatcher_;
  Tensor ids_;
  Plan plan_;
  Tensor x_, y_, weights_, rows_, streams_, slots_;
};

void print_json(const std::vector<MovementTimes>& all) {
  for (const MovementTimes& m : all) {
    const nlohmann::ordered_json line = {
        {"op", m.op},
        {"ms", m.seconds * 1e3},
        {"bytes", m.bytes},
        {"gb_per_s", gigabytes_per_second(m.bytes, m.seconds)},
        {"ceiling_gb_per_s", gigabytes_per_second(m.bytes, m.ceiling_seconds)},
        {"fraction_of_ceiling", m.ceiling_seconds / m.seconds},
        {"bytes_on_wire", m.bytes_on_wire}};
    fmt::print("{}\n", line.dump());
  }
}

void print_table(const std::vector<MovementTimes>& all, const Communicator& comm, MoverKind mover,
                 const BenchDispatchOptions& o) {
  fmt::print("{} tokens of {} x {}, {} experts, {} picks; {} ranks over {}, {} mover\n\n",
             o.num_tokens, o.hidden, name_of(o.dtype), o.num_experts, o.top_k, comm.size(),
             comm.backend(),
             mover == MoverKind::direct ? "direct"
             : mover == MoverKind::peer ? "peer"
                                        : "packed");
  fmt::print("{:<18} {:>9} {:>10} {:>9} {:>9} {:>11} {:>12}\n", "", "ms", "MB", "GB/s", "ceiling",
             "of ceiling", "MB on wire");
  for (const MovementTimes& m : all) {
    fmt::print("{:<18} {:>9.3f} {:>10.2f} {:>9.1f} {:>9.1f} {:>10.0f}% {:>12.2f}\n", m.op,
               m.seconds * 1e3, static_cast<double>(m.bytes) * 1e-6,
               gigabytes_per_second(m.bytes, m.seconds),
               gigabytes_per_second(m.bytes, m.ceiling_seconds),
               m.ceiling_seconds / m.seconds * 100.0, static_cast<double>(m.bytes_on_wire) * 1e-6);
  }
  fmt::print(
      "\nBest of {} rounds. The ceiling is a sequential pass with the same reads and writes by as "
      "many threads.\nThe plan takes {:.1f}% of dispatch's time.\n",
      o.repeat, all[0].seconds / all[1].seconds * 100.0);
}

}  // namespace

void bench_dispatch(const BenchDispatchOptions& options) {
  if (options.device.kind == DeviceKind::cuda) return bench_dispatch_gpu(options);
  launch(options.launch, [&](Communicator& comm) {
    pin_to_core(comm.rank());
    DispatchBench bench(comm, options);
    const auto measurements = bench.run();
    if (comm.rank() != 0) return;
    if (options.json) {
      print_json(measurements);
    } else {
      print_table(measurements, comm, bench.mover(), options);
    }
  });
}

}  // namespace switchyard::cli
