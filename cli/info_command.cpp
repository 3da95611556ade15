// SPDX-License-Identifier: Apache-2.0
// switchyard info: shows what this build has and what can be used now.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "switchyard/build_info.h"

namespace switchyard::cli {
namespace {

void print_features(const char* title, const std::vector<Feature>& features) {
  fmt::print("{}\n", title);
  for (const Feature& feature : features) {
    fmt::print("  {:<9} {:<4} {}\n", feature.name, feature.available ? "yes" : "no",
               feature.detail);
  }
}

nlohmann::json to_json(const std::vector<Feature>& features) {
  auto result = nlohmann::json::object();
  for (const Feature& feature : features) {
    result[feature.name] = {{"available", feature.available}, {"detail", feature.detail}};
  }
  return result;
}

void print_gpus(const std::vector<Gpu>& gpus) {
  if (gpus.empty()) return;
  fmt::print("GPUs\n");
  for (const Gpu& gpu : gpus) {
    const std::string reached =
        gpu.reaches.empty() ? "no other" : fmt::format("{}", fmt::join(gpu.reaches, ", "));
    fmt::print("  {:<9} {}, reaches the memory of {}, processes share it {}\n", gpu.ordinal,
               gpu.name, reached, gpu.is_under_mps ? "by MPS" : "in turns, without MPS");
  }
}

nlohmann::json to_json(const std::vector<Gpu>& gpus) {
  auto result = nlohmann::json::array();
  for (const Gpu& gpu : gpus) {
    result.push_back({{"ordinal", gpu.ordinal},
                      {"name", gpu.name},
                      {"reaches", gpu.reaches},
                      {"mps", gpu.is_under_mps}});
  }
  return result;
}

void print_info(bool as_json) {
  if (as_json) {
    const nlohmann::json info = {{"version", version()},
                                 {"build", to_json(build_features())},
                                 {"devices", to_json(devices())},
                                 {"gpus", to_json(gpus())},
                                 {"communicators", to_json(communicator_backends())}};
    fmt::print("{}\n", info.dump());
    return;
  }
  fmt::print("Switchyard {}\n\n", version());
  print_features("Built with", build_features());
  print_features("Devices that can be used now", devices());
  print_gpus(gpus());
  print_features("Communicators that can be used now", communicator_backends());
}

}  // namespace

void add_info_command(CLI::App& app) {
  auto* info =
      app.add_subcommand("info", "Show what this build supports and what this machine can use");
  const auto as_json = std::make_shared<bool>(false);
  info->add_flag("--json", *as_json, "Print one JSON object");
  info->callback([as_json] { print_info(*as_json); });
}

}  // namespace switchyard::cli
