// SPDX-License-Identifier: Apache-2.0
// switchyard train: flags and their checks.
#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "checkpoints/checkpoints.h"
#include "comm_options.h"
#include "commands.h"
#include "commit.h"
#include "data/corpus.h"
#include "launch.h"
#include "options/limits.h"
#include "options/options.h"
#include "run/resources.h"
#include "run/run.h"
#include "run/stop_signals.h"
#include "switchyard/agreement.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

constexpr int kDefaultRanks = 4;
constexpr int kStopped = 3;  // exit code
// A file alone may ask for this many; a flag may ask for more.
constexpr int kMostRanksOfAFile = 256;
constexpr std::int64_t kMostThreadsOfAFile = 1024;  // over all ranks of the process
constexpr std::size_t kMostConfigBytes = 1 << 20;

struct TrainOptions {
  std::string comm;  // empty: not given
  std::chrono::seconds timeout = kDefaultTimeout;
  train::Assignments flags;
  std::string config;  // path of the file
  bool json = false;
};

// Turns an InvalidArgument, which is the user's mistake, into a usage error.
template <typename Fn>
auto as_usage(const Fn& fn) {
  try {
    return fn();
  } catch (const train::DamagedCheckpoint&) {  // not a mistake on the command line
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
      ->group(option.section);
}

train::Assignments read_config(const std::string& path) {
  if (path.empty()) return {};
  std::string text(kMostConfigBytes + 1, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  if (text.size() > kMostConfigBytes) {
    throw InvalidArgument(fmt::format("{} is larger than a configuration file may be ({} bytes)",
                                      path, kMostConfigBytes));
  }
  return train::parse_config(text, path);
}

// Returns the number of ranks to start as threads.
int num_threads_as_ranks(const train::MeshConfig& mesh) {
  if (mesh.ranks > 0) return mesh.ranks;
  if (mesh.ep == 0) return kDefaultRanks;
  const auto ranks = std::int64_t{mesh.dp} * mesh.ep * mesh.sp;
  if (ranks <= train::kMostRanks) return static_cast<int>(ranks);
  throw InvalidArgument(
      fmt::format("--dp {} × --ep {} × --sp {} are {} ranks, but at most {} are possible", mesh.dp,
                  mesh.ep, mesh.sp, ranks, train::kMostRanks));
}

bool is_given(const train::Assignments& values, std::string_view name) {
  return std::ranges::any_of(values, [&](const auto& value) { return value.first == name; });
}

// A checkpoint or a configuration file may not ask for more ranks and threads than most machines
// can start; flags may.
void require_asked_for(const TrainOptions& o, const train::TrainConfig& config, int ranks) {
  const auto by_flag = [&](std::string_view name) { return is_given(o.flags, name); };
  const bool has_mesh = by_flag("ranks") || by_flag("dp") || by_flag("ep") || by_flag("sp");
  if (!has_mesh && ranks > kMostRanksOfAFile) {
    throw InvalidArgument(fmt::format(
        "a file asks for {} ranks, but may ask for at most {}; if you want them, give --ranks {}",
        ranks, kMostRanksOfAFile, ranks));
  }
  const auto threads = std::int64_t{config.threads} * ranks;
  if (!by_flag("threads") && threads > kMostThreadsOfAFile) {
    throw InvalidArgument(
        fmt::format("a file asks for {} threads on each of {} ranks, but may ask for at most {} in "
                    "all; if you want them, give --threads {}",
                    config.threads, ranks, kMostThreadsOfAFile, config.threads));
  }
}

// Returns the number of this job's processes on this host, as set by mpirun.
int num_processes_here() {
  const char* const size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  return std::max(1, size == nullptr ? 1 : std::atoi(size));
}

void require_memory(const train::TrainConfig& config, const train::Spread& spread,
                    const train::Corpus& text) {
  const auto who = fmt::format("a run of {} rank{}", spread.ranks, spread.ranks == 1 ? "" : "s");
  train::require_memory(train::memory_of_training(config, spread, text.bytes()),
                        train::available_memory(), who);
}

// Requires --comm under mpirun: without it, each process would train a whole run of its own.
void require_chosen_comm(const TrainOptions& o) {
  if (!o.comm.empty()) return;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const char* const size = std::getenv(name);
    if (size == nullptr || std::atoi(size) <= 1) continue;
    throw CLI::ValidationError(
        "--comm", fmt::format("{} processes were started: give --comm mpi for one run over all of "
                              "them, or --comm threads for a separate run in each",
                              size));
  }
}

void note_signals() {
  // Never deleted: a signal that arrives while the process exits must not change how it ends.
  static const auto* const kept = new train::StopSignals();
  (void)kept;
  // A second Ctrl-C kills mpirun without telling its ranks, so they get a signal when it dies.
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) ::prctl(PR_SET_PDEATHSIG, SIGTERM);
}

void train_model(const TrainOptions& o, const std::string& command_line) {
  require_chosen_comm(o);
  const auto file = as_usage([&] { return read_config(o.config); });
  const auto config = as_usage([&] { return train::resolve(file, o.flags); });
  LaunchOptions how{.comm = o.comm.empty() ? "threads" : o.comm, .timeout = o.timeout};
  std::shared_ptr<const train::Corpus> text;  // shared by all ranks
  if (how.comm == "threads") {
    how.ranks = as_usage([&] { return num_threads_as_ranks(config.mesh); });
    train::TrainConfig fitted = config;
    as_usage([&] {
      require_asked_for(o, config, how.ranks);
      train::fit_mesh(fitted, how.ranks);
    });
    text = train::shared_corpus(config.data.corpus);
    require_memory(fitted, {.ranks = how.ranks, .ranks_here = how.ranks}, *text);
  } else if (is_given(o.flags, "ranks") || is_given(file, "ranks")) {
    how.ranks = config.mesh.ranks;
  }
  note_signals();
  std::atomic<bool> is_stopped = false;
  launch(how, [&](Communicator& world) {
    train::TrainConfig here = config;
    here.json = o.json;
    as_usage([&] { train::fit_mesh(here, world.size()); });
    if (how.comm != "threads") {
      agree(world, [&] {
        require_asked_for(o, here, 1);
        const int processes = std::min(num_processes_here(), world.size());
        require_memory(here,
                       {.ranks = world.size(), .ranks_here = processes, .texts_here = processes},
                       *train::shared_corpus(here.data.corpus));
      });
    }
    const train::Program program{.command_line = command_line, .commit = kCommit};
    if (train::run(world, here, program) == train::RunEnd::stopped) is_stopped = true;
  });
  if (is_stopped) throw CLI::RuntimeError(kStopped);
}

}  // namespace

void add_train_command(CLI::App& app, const std::string& command_line) {
  auto* command =
      app.add_subcommand("train",
                         "Train a small MoE language model on text, and write a report. Without "
                         "options, this takes about two minutes on two cores, trains on the King "
                         "James Bible, and writes switchyard-report.html to the current folder");
  const auto o = std::make_shared<TrainOptions>();
  add_comm_options(command, o->comm, o->timeout);
  command
      ->add_option("--config", o->config,
                   "File with a JSON object of the options below, such as {\"steps\": 100}; flags "
                   "override it [none]")
      ->check(CLI::ExistingFile);
  command->add_flag("--json", o->json, "Print one JSON object per step");
  train::TrainConfig defaults;
  for (const auto& option : train::options_of(defaults)) add_flag(command, option, o);
  command->footer(
      "Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end the run after the current step, with a checkpoint "
      "if --save is given. A second Ctrl-C, at least a second later, ends it at once.\nExit codes: "
      "0 done, 1 failed, 2 wrong usage, 3 stopped by a signal.");
  command->callback([o, command_line] { train_model(*o, command_line); });
}

}  // namespace switchyard::cli
