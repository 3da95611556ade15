// switchyard train: flags and their checks.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "checkpoints/checkpoints.h"
#include "commands.h"
#include "launch.h"
#include "options/options.h"
#include "run/run.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr int kDefaultRanks = 4;

struct TrainOptions {
  LaunchOptions launch;
  train::Assignments flags;
  std::string config;  // file
  bool json = false;
};

// What a user got wrong is an error of the command line.
template <typename Fn>
auto as_usage(const Fn& fn) {
  try {
    return fn();
  } catch (const train::DamagedCheckpoint&) {  // by nobody's command
    throw;
  } catch (const InvalidArgument& error) {
    throw CLI::ValidationError(error.what());
  }
}

void add_flag(CLI::App* command, const train::Option& option,
              const std::shared_ptr<TrainOptions>& o) {
  const auto take = [o, name = option.name](const std::string& value) {
    o->flags.emplace_back(name, value);
    train::TrainConfig scratch;
    as_usage([&] { train::assign(scratch, {o->flags.back()}); });
  };
  command
      ->add_option_function<std::string>("--" + option.name, take,
                                         fmt::format("{} [{}]", option.help, option.get()))
      ->type_name(option.type)
      ->group(option.group);
}

train::Assignments read_config(const std::string& path) {
  if (path.empty()) return {};
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return train::parse_config(text.str(), path);
}

void train_model(const TrainOptions& o) {
  const auto config = as_usage([&] { return train::resolve(read_config(o.config), o.flags); });
  LaunchOptions how = o.launch;
  if (how.comm == "threads" && how.ranks == 0) how.ranks = kDefaultRanks;
  launch(how, [&](Communicator& world) {
    as_usage([&] { train::check(config, world.size()); });
    train::TrainConfig here = config;
    here.json = o.json;
    if (here.threads == 0) here.threads = std::max(1, num_cores() / world.size());
    train::run(world, here);
  });
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "train",
      "Train a small MoE language model on text, and write a report of it. Without options: about "
      "two minutes on two cores, on the text of this project");
  const auto o = std::make_shared<TrainOptions>();
  command->add_option("--ranks", o->launch.ranks, "Ranks [4; with --comm mpi those of mpirun]")
      ->check(CLI::Range(1, 1024));
  command->add_option("--comm", o->launch.comm, "How ranks are connected [threads]")
      ->check(CLI::IsMember({"threads", "mpi"}));
  command
      ->add_option("--config", o->config,
                   "JSON object of the options below, such as {\"steps\": 100}; flags come first "
                   "[none]")
      ->check(CLI::ExistingFile);
  command->add_flag("--json", o->json, "Print one JSON object a step");
  train::TrainConfig defaults;
  for (const auto& option : train::options_of(defaults)) add_flag(command, option, o);
  command->callback([o] { train_model(*o); });
}

}  // namespace switchyard::cli
