// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_layer_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "bench/gpu_movement.h"
#include "common/printable.h"
#include "switchyard/build_info.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

bool has_portable_kernels(const BenchLayerOptions& o) {
  return o.device.cuda().kernels == CudaKernels::portable;
}

double flop(const BenchLayerOptions& o, double products) {
  return 2.0 * products * static_cast<double>(o.num_tokens * o.top_k) *
         static_cast<double>(o.hidden * o.intermediate);
}

GpuMovement movement_of(const BenchLayerOptions& o, const GpuLayerResult& r) {
  return {.num_tokens = o.num_tokens,
          .top_k = o.top_k,
          .distinct_tokens = r.distinct_tokens,
          .row_bytes = o.hidden * size_of(o.dtype)};
}

// Returns the bytes that forward must move; forward and backward together move twice as many.
double forward_movement_bytes(const BenchLayerOptions& o, const GpuLayerResult& r) {
  const GpuMovement movement = movement_of(o, r);
  return movement.scatter_bytes() + movement.gather_bytes();
}

// Returns the bytes that a stage must move, or 0 for a stage that is bound by arithmetic. If a
// single rank dispatches at all, it writes rows.
double bytes_of(const BenchLayerOptions& o, const GpuLayerResult& r, std::string_view stage) {
  const GpuMovement movement = movement_of(o, r);
  if (stage == "combine" || stage == "dispatch_backward") return movement.gather_bytes();
  if (stage != "dispatch" && stage != "combine_backward" && stage != "dispatch_again") return 0.0;
  return r.num_ranks == 1 ? movement.scatter_rows_bytes() : movement.scatter_bytes();
}

ordered_json both(const CoolAndHot& v, double scale) {
  return {{"cool", v.cool * scale}, {"hot", v.hot * scale}};
}

ordered_json stages_json(const BenchLayerOptions& o, const GpuLayerResult& r,
                         const std::vector<LayerStats::Stage>& stages) {
  auto json = ordered_json::array();
  for (const auto& stage : stages) {
    ordered_json entry{{"stage", stage.name}, {"ms", stage.seconds * 1e3}};
    if (const double bytes = bytes_of(o, r, stage.name); bytes > 0.0) {
      entry["fraction_of_copy"] = bytes / stage.seconds / r.copy.cool;
    }
    json.push_back(entry);
  }
  return json;
}

void print_json(const BenchLayerOptions& o, const GpuLayerResult& r) {
  const auto rate = [&](double products, const CoolAndHot& s) {
    return both(flop(o, products) / s, 1e-12);
  };
  ordered_json line{{"shape", o.shape_name},
                    {"num_tokens", o.num_tokens},
                    {"hidden", o.hidden},
                    {"intermediate", o.intermediate},
                    {"num_experts", o.num_experts},
                    {"top_k", o.top_k},
                    {"dtype", name_of(o.dtype)},
                    {"device", "cuda"},
                    {"gpu", devices().back().detail},
                    {"ranks", r.num_ranks},
                    {"gpus", r.num_gpus},
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
  if (r.num_ranks > 1) {
    const double bytes = forward_movement_bytes(o, r);
    line["distinct_tokens"] = r.distinct_tokens;
    line["movement_bytes_forward"] = static_cast<std::int64_t>(bytes);
    line["movement_bytes_forward_backward"] = static_cast<std::int64_t>(2.0 * bytes);
    line["movement_floor_ms_forward"] = both(bytes / r.copy, 1e3);
    line["movement_floor_ms_forward_backward"] = both(2.0 * bytes / r.copy, 1e3);
  }
  if (!r.no_graph.empty()) {
    line["not_captured"] = r.no_graph;
  } else if (r.replay.cool > 0.0) {
    line["ms_forward_replayed"] = both(r.forward_replay, 1e3);
    line["ms_replayed"] = both(r.replay, 1e3);
    line["tflops_replayed"] = rate(9.0, r.replay);
  }
  fmt::print("{}\n", line.dump());
}

void print_stages(const BenchLayerOptions& o, const GpuLayerResult& r, std::string_view title,
                  const std::vector<LayerStats::Stage>& stages) {
  fmt::print("\n{}\n", title);
  for (const auto& stage : stages) {
    fmt::print("  {:<18} {:>9.3f} ms", stage.name, stage.seconds * 1e3);
    if (const double bytes = bytes_of(o, r, stage.name); bytes > 0.0) {
      fmt::print(" {:>5.0f} GB/s, {:.0f}% of a copy", bytes / stage.seconds * 1e-9,
                 bytes / stage.seconds / r.copy.cool * 100.0);
    }
    fmt::print("\n");
  }
}

void print_times(const BenchLayerOptions& o, const GpuLayerResult& r) {
  fmt::print("{:<18} {:>10} {:>10}  {:>8} {:>8}   {}\n", "", "ms cool", "ms hot", "TF cool",
             "TF hot", "of the GEMM ceiling");
  const auto line = [&](std::string_view name, const CoolAndHot& s, double products) {
    const CoolAndHot rate = flop(o, products) / s;
    fmt::print("{:<18} {:>10.3f} {:>10.3f}  {:>8.1f} {:>8.1f}", name, s.cool * 1e3, s.hot * 1e3,
               rate.cool * 1e-12, rate.hot * 1e-12);
    if (r.gemm.cool > 0.0) {
      fmt::print("   {:.0f}% {:.0f}%", rate.cool / r.gemm.cool * 100.0,
                 rate.hot / r.gemm.hot * 100.0);
    }
    fmt::print("\n");
  };
  const auto replayed = [&](const CoolAndHot& s, double products) {
    if (s.cool > 0.0 && r.no_graph.empty()) {
      line(r.num_ranks > 1 ? "  as graphs" : "  as a graph", s, products);
    }
  };
  line("forward", r.forward, 3.0);
  replayed(r.forward_replay, 3.0);
  line("forward+backward", r.step, 9.0);
  replayed(r.replay, 9.0);
  if (!r.no_graph.empty()) fmt::print("  not captured: {}\n", train::printable(r.no_graph));
}

void print_ceilings(const BenchLayerOptions& o, const GpuLayerResult& r) {
  if (r.gemm.cool > 0.0) {
    fmt::print("{:<18} {:>10} {:>10}  {:>8.1f} {:>8.1f}   cuBLAS, [T K, H] x [H, 2 I]{}\n",
               "GEMM ceiling", "", "", r.gemm.cool * 1e-12, r.gemm.hot * 1e-12,
               r.num_gpus > 1 ? fmt::format(", times {} GPUs", r.num_gpus) : "");
  } else {
    fmt::print("No GEMM ceiling: {}\n", r.no_gemm);
  }
  fmt::print("Copy ceiling: {:.0f} GB/s cool, {:.0f} hot, read and written{}\n", r.copy.cool * 1e-9,
             r.copy.hot * 1e-9, r.num_ranks > 1 ? ", all ranks at once" : "");
  if (r.num_ranks == 1) return;
  const auto floor = [&](std::string_view name, double bytes) {
    const CoolAndHot seconds = bytes / r.copy;
    fmt::print("  {:<16} {:>10.3f} {:>10.3f}  {:.1f} MB\n", name, seconds.cool * 1e3,
               seconds.hot * 1e3, bytes * 1e-6);
  };
  fmt::print("Floor of movement, a token going to a rank once, as fast as that copy:\n");
  floor("forward", forward_movement_bytes(o, r));
  floor("forward+backward", 2.0 * forward_movement_bytes(o, r));
}

void print_table(const BenchLayerOptions& o, const GpuLayerResult& r) {
  fmt::print("{}: {} tokens, H {}, I {}, {} experts, {} picks, {}, {} sizing, ", o.shape_name,
             o.num_tokens, o.hidden, o.intermediate, o.num_experts, o.top_k, name_of(o.dtype),
             o.sizing == BenchSizing::bounded ? "bounded" : "exact");
  fmt::print("on {}{}", devices().back().detail,
             has_portable_kernels(o) ? ", by portable kernels" : "");
  if (r.num_ranks > 1) fmt::print("; {} ranks, GPUs in use: {}", r.num_ranks, r.num_gpus);
  fmt::print("\n\n");
  print_times(o, r);
  print_ceilings(o, r);
  print_stages(o, r, "forward, of forward+backward", r.forward_stages);
  print_stages(o, r, "backward", r.backward_stages);
  fmt::print(
      "\nHost syncs{}: {} forward, {} backward. Kept for backward: {:.0f} bytes per token. "
      "Medians; stages of the last of {}{}.\n",
      r.num_ranks > 1 ? " of rank 0" : "", r.syncs_forward, r.syncs_backward,
      static_cast<double>(r.activation_bytes) / static_cast<double>(o.num_tokens), o.repeat,
      r.num_ranks > 1 ? ", mean over ranks" : "");
}

}  // namespace

void print_gpu_layer(const BenchLayerOptions& options, const GpuLayerResult& result) {
  if (options.json) {
    print_json(options, result);
  } else {
    print_table(options, result);
  }
}

}  // namespace switchyard::cli
