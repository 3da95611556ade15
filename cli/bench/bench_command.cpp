// SPDX-License-Identifier: Apache-2.0
// switchyard bench: flags and their checks.
#include <fmt/format.h>

#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "add_choice.h"
#include "bench/benchmarks.h"
#include "bench/layer_shapes.h"
#include "comm_options.h"
#include "commands.h"

namespace switchyard::cli {
namespace {

// Parses a list such as "8192,2048,64,2" into `count` positive numbers.
std::vector<std::int64_t> parse_shape(const std::string& text, std::size_t count,
                                      std::string_view names) {
  std::vector<std::int64_t> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    std::int64_t number = 0;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number <= 0 || (next != end && *next != ',')) break;
    numbers.push_back(number);
    at = next == end ? end : next + 1;
  }
  if (at != end || numbers.size() != count || text.back() == ',') {
    throw CLI::ValidationError("--shape",
                               fmt::format("\"{}\" is not {}: {} positive numbers separated by "
                                           "commas",
                                           text, names, count));
  }
  return numbers;
}

constexpr std::int64_t kMostExperts = 1 << 20;

void require_few_experts(std::int64_t num_experts) {
  if (num_experts <= kMostExperts) return;
  throw CLI::ValidationError("--shape",
                             fmt::format("E ({}) must be at most {}", num_experts, kMostExperts));
}

void require_distinct_picks(std::int64_t top_k, int num_experts) {
  if (top_k <= num_experts) return;
  throw CLI::ValidationError("--shape",
                             fmt::format("K ({}) must not exceed E ({})", top_k, num_experts));
}

void add_launch(CLI::App* command, LaunchOptions& launch,
                const std::string& ranks_help = "Number of ranks [one per core, at most 8]") {
  command->add_option("--ranks", launch.ranks, ranks_help)->check(CLI::Range(1, 1024));
  add_comm_options(command, launch);
}

// Adds the options of benchmarks that run on CPUs and on GPUs.
void add_launch_and_device(CLI::App* command, LaunchOptions& launch, DeviceChoice& device) {
  add_launch(command, launch, "Number of ranks [one per core, at most 8; 1 with --device cuda]");
  add_device_options(
      command, device,
      "Where to compute; with cuda, ranks are spread over the GPUs, at most 32 as threads [cpu]");
}

const std::map<std::string, Dtype> kDtypes{{"f32", Dtype::f32}, {"bf16", Dtype::bf16}};
const std::map<std::string, RoutingKind> kRoutings{{"balanced", RoutingKind::balanced},
                                                   {"uniform", RoutingKind::uniform},
                                                   {"zipf", RoutingKind::zipf},
                                                   {"one-expert", RoutingKind::one_expert}};

void add_dispatch(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "dispatch",
      "Time plan, dispatch, combine and their backward passes, and compare with memory bandwidth");
  const auto o = std::make_shared<BenchDispatchOptions>();
  command
      ->add_option_function<std::string>(
          "--shape",
          [o](const std::string& text) {
            const auto n = parse_shape(text, 4, "T,H,E,K");
            require_few_experts(n[2]);
            o->num_tokens = n[0];
            o->hidden = n[1];
            o->num_experts = static_cast<int>(n[2]);
            o->top_k = n[3];
          },
          "Tokens over all ranks, hidden size, experts, picks per token [8192,2048,64,2]")
      ->type_name("T,H,E,K");
  add_launch_and_device(command, o->launch, o->device);
  add_choice(
      command, "--mover", o->mover, "How rows move between ranks [direct if ranks share memory]",
      std::map<std::string, MoverKind>{
          {"direct", MoverKind::direct}, {"packed", MoverKind::packed}, {"peer", MoverKind::peer}});
  add_choice(command, "--dtype", o->dtype, "Dtype of the rows [f32]", kDtypes);
  add_choice(command, "--routing", o->routing, "How tokens pick experts [uniform]", kRoutings);
  command->add_option("--repeat", o->repeat, "Rounds on CPUs; the fastest is reported [20]")
      ->check(CLI::Range(1, 100000));
  command->add_flag("--json", o->json, "Print one JSON object per operation, each on its own line");
  command->callback([o] {
    require_distinct_picks(o->top_k, o->num_experts);
    require_sound(o->device, o->launch);
    if (o->device.kind == DeviceKind::cuda && o->mover == MoverKind::packed) {
      throw CLI::ValidationError("--mover",
                                 "packed works only on CPUs: leave the option out, or use peer");
    }
    prepare_environment(o->device, o->launch);
    bench_dispatch(*o);
  });
}

LayerShape parse_layer_shape(const std::string& text) {
  if (const LayerShape* named = find_layer_shape(text)) return *named;
  const auto n = parse_shape(text, 5, layer_shape_names() + ", or T,H,I,E,K");
  require_few_experts(n[3]);
  return {text, n[0], n[1], n[2], n[3], n[4]};
}

void set_layer_shape(BenchLayerOptions& o, const std::string& text) {
  const LayerShape shape = parse_layer_shape(text);
  o.shape_name = text;
  o.num_tokens = shape.num_tokens;
  o.hidden = shape.hidden;
  o.intermediate = shape.intermediate;
  o.num_experts = static_cast<int>(shape.num_experts);
  o.top_k = shape.top_k;
}

void add_layer(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "layer",
      "Time the whole layer, forward and backward, and compare with the matrix library alone");
  const auto o = std::make_shared<BenchLayerOptions>();
  command
      ->add_option_function<std::string>(
          "--shape", [o](const std::string& text) { set_layer_shape(*o, text); },
          "Tokens over all ranks, hidden and intermediate size, experts, picks per token; or a "
          "name: " +
              layer_shape_names() + " [small]")
      ->type_name("NAME|T,H,I,E,K");
  add_launch_and_device(command, o->launch, o->device);
  command->add_option("--threads", o->threads, "Threads of each rank [cores / ranks]")
      ->check(CLI::Range(1, 1024));
  add_choice(command, "--dtype", o->dtype, "Dtype of tokens and weights [f32]", kDtypes);
  add_choice(command, "--sizing", o->sizing,
             "Buffers as large as the step needs (exact) or of a fixed size (bounded) [exact]",
             std::map<std::string, BenchSizing>{{"exact", BenchSizing::exact},
                                                {"bounded", BenchSizing::bounded}});
  auto routings = kRoutings;
  routings["router"] = RoutingKind::router;
  add_choice(command, "--routing", o->routing,
             "How tokens pick experts; all except router use picks made in advance [router]",
             routings);
  add_choice(command, "--weight-stage", o->weight_stage,
             "Where the routing weight is applied [output]",
             std::map<std::string, WeightStage>{{"output", WeightStage::output},
                                                {"activation", WeightStage::activation},
                                                {"input", WeightStage::input}});
  add_choice(
      command, "--keep", o->keep, "What forward keeps for backward [rows]",
      std::map<std::string, Keep>{
          {"rows", Keep::rows}, {"activations", Keep::activations}, {"nothing", Keep::nothing}});
  command->add_flag("--losses", o->losses, "Include the balance loss and the z-loss");
  command
      ->add_option("--repeat", o->repeat,
                   "Rounds; the fastest is reported; on GPUs, rounds that time the stages [10]")
      ->check(CLI::Range(1, 100000));
  command->add_flag("--json", o->json, "Print one JSON object");
  command->callback([o] {
    require_distinct_picks(o->top_k, o->num_experts);
    require_sound(o->device, o->launch);
    if (o->device.kind == DeviceKind::cuda && o->threads > 0) {
      throw CLI::ValidationError("--threads", "it works only on CPUs: leave the option out");
    }
    prepare_environment(o->device, o->launch);
    bench_layer(*o);
  });
}

void add_checkpoint(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "checkpoint",
      "Time saving and loading experts, and compare with plain reads of the same bytes");
  const auto o = std::make_shared<BenchCheckpointOptions>();
  add_launch(command, o->launch);
  command->add_option("--size", o->size, "Bytes of all experts, such as 64MiB [1GiB]")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 50));
  command->add_option("--dir", o->folder, "Folder for the file [the system's temporary folder]")
      ->check(CLI::ExistingDirectory);
  command->add_option("--repeat", o->repeat, "Rounds; the fastest is reported [5]")
      ->check(CLI::Range(1, 100000));
  command->add_flag("--json", o->json, "Print one JSON object");
  command->callback([o] { bench_checkpoint(*o); });
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto* bench = app.add_subcommand(
      "bench", "Measure speed, and compare with a ceiling measured in the same run");
  bench->require_subcommand(1);
  add_dispatch(*bench);
  add_layer(*bench);
  add_checkpoint(*bench);
}

}  // namespace switchyard::cli
