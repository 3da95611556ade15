// switchyard bench: flags and their checks.
#include <fmt/format.h>

#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench_dispatch.h"
#include "commands.h"

namespace switchyard::cli {
namespace {

// "8192,2048,64,2" into so many positive numbers.
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

template <typename T>
CLI::Option* add_choice(CLI::App* command, const std::string& flag, T& value,
                        const std::string& help, const std::map<std::string, T>& choices) {
  std::string names;
  for (const auto& [name, choice] : choices) names += (names.empty() ? "" : "|") + name;
  const auto pick = [&value, choices, flag, names](const std::string& text) {
    const auto found = choices.find(text);
    if (found == choices.end()) {
      throw CLI::ValidationError(flag, fmt::format("\"{}\" is not one of {}", text, names));
    }
    value = found->second;
  };
  return command->add_option_function<std::string>(flag, pick, help)->type_name(names);
}

void add_dispatch(CLI::App& bench) {
  auto* command = bench.add_subcommand(
      "dispatch", "Plan, dispatch, combine and their backwards, beside what memory allows");
  const auto o = std::make_shared<BenchDispatchOptions>();
  command
      ->add_option_function<std::string>(
          "--shape",
          [o](const std::string& text) {
            const auto n = parse_shape(text, 4, "T,H,E,K");
            if (n[2] > kMostExperts) {
              throw CLI::ValidationError(
                  "--shape", fmt::format("E ({}) must be at most {}", n[2], kMostExperts));
            }
            o->num_tokens = n[0];
            o->hidden = n[1];
            o->num_experts = static_cast<int>(n[2]);
            o->top_k = n[3];
          },
          "Tokens over all ranks, hidden size, experts, picks a token [8192,2048,64,2]")
      ->type_name("T,H,E,K");
  command->add_option("--ranks", o->launch.ranks, "Ranks [one a core, at most 8]")
      ->check(CLI::Range(1, 1024));
  command->add_option("--comm", o->launch.comm, "How ranks are connected [threads]")
      ->check(CLI::IsMember({"threads", "mpi"}));
  add_choice(command, "--mover", o->mover, "How rows travel [direct where memory is shared]",
             std::map<std::string, MoverKind>{{"direct", MoverKind::direct},
                                              {"packed", MoverKind::packed}});
  add_choice(command, "--dtype", o->dtype, "Type of the rows [f32]",
             std::map<std::string, Dtype>{{"f32", Dtype::f32}, {"bf16", Dtype::bf16}});
  add_choice(command, "--routing", o->routing, "How tokens pick experts [uniform]",
             std::map<std::string, RoutingKind>{{"balanced", RoutingKind::balanced},
                                                {"uniform", RoutingKind::uniform},
                                                {"zipf", RoutingKind::zipf},
                                                {"one-expert", RoutingKind::one_expert}});
  command->add_option("--repeat", o->repeat, "Rounds; the best counts [20]")
      ->check(CLI::Range(1, 100000));
  command->add_flag("--json", o->json, "Print one JSON object a line, one an operation");
  command->callback([o] {
    if (o->top_k > o->num_experts) {
      throw CLI::ValidationError(
          "--shape", fmt::format("K ({}) must not exceed E ({})", o->top_k, o->num_experts));
    }
    bench_dispatch(*o);
  });
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto* bench = app.add_subcommand("bench", "Measure, beside the ceiling of the same run");
  bench->require_subcommand(1);
  add_dispatch(*bench);
}

}  // namespace switchyard::cli
