// SPDX-License-Identifier: Apache-2.0
#include "options/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoints/checkpoint_folder.h"
#include "checkpoints/checkpoints.h"
#include "common/closest.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

using Json = nlohmann::ordered_json;

Option& find(std::vector<Option>& options, const std::string& name) {
  const auto found = std::ranges::find(options, name, &Option::name);
  if (found != options.end()) return *found;
  std::vector<std::string> names;
  for (const auto& option : options) names.push_back(option.name);
  throw InvalidArgument(
      fmt::format("\"{}\" is not an option{}", name, hint_at_closest(name, names)));
}

// Numbers and booleans keep their JSON type; everything else is a string.
Json json_of(const Option& option) {
  const bool is_string = option.type != "N" && option.type != "X" && option.type != "true|false";
  return is_string ? Json(option.get()) : Json::parse(option.get());
}

// Throws if a key occurs twice; the JSON library silently keeps one of them.
Json parse_once(std::string_view text, std::string_view source) {
  std::set<std::string> keys;
  return Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event != Json::parse_event_t::key || depth != 1) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (keys.insert(key).second) return true;
    throw InvalidArgument(fmt::format("{} has \"{}\" twice", source, key));
  });
}

Json parse_object(std::string_view text, std::string_view source) {
  Json object;
  try {
    object = parse_once(text, source);
  } catch (const Json::parse_error& error) {
    const auto before = text.substr(0, std::min(error.byte, text.size()));
    throw InvalidArgument(fmt::format("{} is not JSON: an error in line {}", source,
                                      1 + std::ranges::count(before, '\n')));
  } catch (const Json::out_of_range&) {
    throw InvalidArgument(fmt::format("{} has a number that is too large", source));
  }
  if (object.is_object()) return object;
  throw InvalidArgument(fmt::format("{} is not a JSON object of options", source));
}

std::string value_of(const std::string& key, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  throw InvalidArgument(fmt::format("\"{}\" must be a number, a string, true or false", key));
}

void require_kept(const TrainConfig& checkpoint, TrainConfig config) {
  TrainConfig before = checkpoint;
  const auto old = options_of(before);
  const auto now = options_of(config);
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (!now[i].is_fixed || now[i].get() == old[i].get()) continue;
    throw InvalidArgument(fmt::format("--{} {} cannot be changed: the run resumed from {} has {}",
                                      now[i].name, now[i].get(), config.resume, old[i].get()));
  }
}

}  // namespace

void assign(TrainConfig& config, const Assignments& values) {
  auto options = options_of(config);
  for (const auto& [name, value] : values) find(options, name).set(value);
}

std::string to_json(const TrainConfig& config) {
  TrainConfig copy = config;
  Json object = Json::object();
  for (const auto& option : options_of(copy)) object[option.name] = json_of(option);
  return object.dump(2, ' ', false, Json::error_handler_t::replace);
}

Assignments parse_config(std::string_view json, std::string_view source) {
  const Json object = parse_object(json, source);
  TrainConfig scratch;
  Assignments values;
  for (const auto& [key, value] : object.items()) {
    try {
      values.emplace_back(key, value_of(key, value));
      assign(scratch, {values.back()});
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("{}: {}", source, error.what()));
    }
  }
  return values;
}

TrainConfig merge(const std::optional<TrainConfig>& checkpoint, const Assignments& file,
                  const Assignments& flags) {
  const auto is_given = [&](std::string_view name) {
    const auto has = [&](const auto& value) { return value.first == name; };
    return std::ranges::any_of(file, has) || std::ranges::any_of(flags, has);
  };
  TrainConfig config;
  if (checkpoint) {
    const TrainConfig defaults = config;
    config = *checkpoint;
    config.threads = defaults.threads;
    config.report = defaults.report;
    const std::array mesh{"ranks", "dp", "ep", "sp"};
    if (std::ranges::any_of(mesh, is_given)) {
      const auto axes = config.mesh.expert_axes;
      config.mesh = {.expert_axes = axes};
    }
  }
  assign(config, file);
  assign(config, flags);
  if (checkpoint) require_kept(*checkpoint, config);
  auto& rates = config.optimizer;
  if (is_given("warm-up") && rates.warm_up > config.steps) {
    throw InvalidArgument(
        fmt::format("--warm-up {} must be at most --steps {}", rates.warm_up, config.steps));
  }
  if (!is_given("final-learning-rate")) {
    rates.final_learning_rate = std::min(rates.final_learning_rate, rates.learning_rate);
  }
  return config;
}

TrainConfig resolve(const Assignments& file, const Assignments& flags) {
  auto given = merge(std::nullopt, file, flags);
  if (given.resume.empty()) return given;
  auto checkpoint = read_header(given.resume);
  auto& save = checkpoint.config.save;
  if (!save.empty()) save = folder_of(checkpoint.path).string();  // the folder may have been moved
  return merge(checkpoint.config, file, flags);
}

}  // namespace switchyard::train
