// SPDX-License-Identifier: Apache-2.0
// switchyard soak: runs random cases until the time is up, and checks every step.
#include <fmt/format.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "between_ranks.h"
#include "commands.h"
#include "device_choice.h"
#include "progress.h"
#include "run/stop_signals.h"
#include "soak/soak_case.h"
#include "soak/soak_run.h"

namespace switchyard::cli {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kProgressEvery = 2s;
constexpr std::int64_t kWarmCases = 20;  // cases to run before memory is measured
constexpr auto kLongestCase = 15min;     // longer than all deadlines of its collectives

struct SoakCommand {
  double minutes = 1.0;
  std::int64_t cases = 0;  // 0: as many as time allows
  std::int64_t only = -1;  // the only case to run; −1: run all
  std::uint64_t seed = 1;
  std::string ranks = "random";
  std::string comm = "threads";
  SoakOptions options;

  int num_ranks() const { return ranks == "random" ? 0 : std::stoi(ranks); }
};

// Returns the resident memory, without free memory that the allocator keeps.
std::int64_t resident_bytes() {
  ::malloc_trim(0);
  std::int64_t total = 0;
  std::int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::int64_t peak_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * std::int64_t{1024};
}

std::int64_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// After a kill MPI is not finalised, which mpirun reports as a failure of the job unless this
// parameter is set. Ranks see mpirun's parameters in their environment.
constexpr const char* kLetsRanksLeave = "orte_allowed_exit_without_sync";
bool may_kill(const std::string& comm) {
  const char* const value = std::getenv(fmt::format("OMPI_MCA_{}", kLetsRanksLeave).c_str());
  return comm == "threads" || (value != nullptr && std::string_view(value) == "1");
}

std::string command_for(const SoakCommand& o, const SoakCase& c) {
  std::string command = fmt::format("switchyard soak --seed {} --case {}", c.seed, c.number);
  if (o.comm != "threads") {
    const auto leave = may_kill(o.comm) ? fmt::format(" --mca {} 1", kLetsRanksLeave) : "";
    command = fmt::format("mpirun -n {}{} {} --comm {}", c.num_ranks, leave, command, o.comm);
  } else if (o.ranks != "random") {
    command += " --ranks " + o.ranks;
  }
  if (o.options.device.kind == DeviceKind::cuda) command += " --device cuda";
  if (o.options.device.kernels == CudaKernels::portable) command += " --kernels portable";
  return command;
}

std::string words_for_failure(const SoakCommand& o, const SoakCase& c, const std::string& error) {
  return fmt::format("switchyard: soak: case {} of seed {} failed: {}\n  {}\nrepeat it with: {}\n",
                     c.number, c.seed, error, c.words(), command_for(o, c));
}

// Ends the process if a case does not finish: an exception cannot end a case that hangs.
class CaseWatch {
 public:
  CaseWatch() : thread_([this](const std::stop_token& stop) { watch(stop); }) {}

  void begin(std::string words) {
    const std::scoped_lock lock(mutex_);
    words_ = std::move(words);
    deadline_ = Clock::now() + kLongestCase;
  }

 private:
  void watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      wake_.wait_until(lock, stop, deadline_, [] { return false; });
      if (stop.stop_requested() || Clock::now() < deadline_) continue;
      std::fputs(words_.c_str(), stderr);
      std::_Exit(1);
    }
  }

  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::string words_;
  Clock::time_point deadline_ = Clock::now() + kLongestCase;
  std::jthread thread_;  // declared last, because it uses the other members
};

// Runs cases in one process: all ranks of them if ranks are threads, otherwise one rank's part.
class Soak {
 public:
  Soak(Communicator& world, const SoakCommand& o, const DeviceChoice& device)
      : world_(world), o_(o) {
    options_ = o.options;
    options_.device = device;
    options_.kills = may_kill(o.comm);
    limits_ = {.ranks = o.comm == "threads" ? o.num_ranks() : world.size(),
               .is_gpu = device.kind == DeviceKind::cuda,
               .maps_memory = o.comm == "threads"};
  }

  void print_beginning() const {
    if (world_.rank() != 0) return;
    fmt::print("seed {}, {} over {}\n", o_.seed,
               limits_.ranks == 0   ? "random ranks"
               : limits_.ranks == 1 ? "1 rank"
                                    : fmt::format("{} ranks", limits_.ranks),
               o_.comm);
    std::fflush(stdout);
  }

  // Returns true if all cases passed.
  bool run() {
    for (std::int64_t number = std::max<std::int64_t>(0, o_.only); goes_on(); ++number) {
      const SoakCase c = draw_case(o_.seed, number, limits_);
      watch_.begin(words_for_failure(o_, c, "it does not end"));
      const std::string error = error_of(c);
      if (!error.empty()) {
        show_progress(world_, "");
        if (world_.rank() == 0) std::fputs(words_for_failure(o_, c, error).c_str(), stderr);
        return false;
      }
      if (figures_.cases == kWarmCases) warm_bytes_ = resident_bytes();
      report_progress();
    }
    show_progress(world_, "");
    return true;
  }

  void print_figures() const {
    const std::chrono::duration<double> seconds = Clock::now() - begin_;
    fmt::print("{} cases in {:.1f} s: {} steps of {} tokens, {} kills, {} expected errors\n",
               figures_.cases, seconds.count(), figures_.steps, figures_.tokens, figures_.kills,
               figures_.errors);
    if (!options_.kills) fmt::print("kills need mpirun --mca {} 1\n", kLetsRanksLeave);
    fmt::print("memory:{} {:.0f} MiB at the end, {:.0f} MiB at most\n",
               warm_bytes_ == 0
                   ? ""
                   : fmt::format(" {:.0f} MiB after {} cases,", mib(warm_bytes_), kWarmCases),
               mib(resident_bytes()), mib(peak_bytes()));
    fmt::print("descriptors: {} at the start, {} at the end\n", descriptors_, open_descriptors());
  }

 private:
  // Collective. All ranks go on, or none does.
  bool goes_on() {
    const bool is_over =
        o_.only >= 0   ? figures_.cases > 0
        : o_.cases > 0 ? figures_.cases >= o_.cases
                       : Clock::now() - begin_ >= std::chrono::duration<double>(o_.minutes * 60.0);
    const bool ends = is_over || signals_.received();
    return reduce_number(world_, ends ? 1 : 0, ReduceOp::max) == 0;
  }

  std::string error_of(const SoakCase& c) {
    try {
      if (o_.comm == "threads") {
        run_on_threads(c, options_, figures_);
      } else {
        run_on_processes(world_, c, options_, figures_);
      }
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  }

  void report_progress() {
    if (Clock::now() < next_report_) return;
    next_report_ = Clock::now() + kProgressEvery;
    const auto seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    show_progress(world_, fmt::format("{:.0f} s: {} cases, {} steps, {} kills", seconds,
                                      figures_.cases, figures_.steps, figures_.kills));
  }

  Communicator& world_;
  const SoakCommand& o_;
  SoakOptions options_;
  CaseLimits limits_;
  SoakFigures figures_;
  train::StopSignals signals_;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point next_report_ = begin_;
  std::int64_t warm_bytes_ = 0;
  CaseWatch watch_;
  std::int64_t descriptors_ = open_descriptors();
};

bool soak(const SoakCommand& o) {
  // Threads come and go; arenas of their own would grow for a while and hide leaks.
  ::mallopt(M_ARENA_MAX, 1);
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  bool passed = false;
  const LaunchOptions how{.comm = o.comm, .ranks = o.comm == "threads" ? 1 : o.num_ranks()};
  launch_on(o.options.device, how, [&](Communicator& world, const DeviceChoice& device) {
    Soak run(world, o, device);
    run.print_beginning();
    const bool is_right = run.run();
    if (world.rank() == 0) run.print_figures();
    // mpirun kills all ranks when one exits with an error, or without having finalised MPI, so
    // ranks exit only after the output is written.
    std::fflush(stdout);
    world.barrier();
    passed = is_right;
  });
  return passed;
}

}  // namespace

void add_soak_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "soak",
      "Run random layers on random ranks for some time, kill some ranks, and compare every step "
      "with the bits of one rank and with a plain loop in double precision");
  const auto o = std::make_shared<SoakCommand>();
  auto* minutes = command->add_option("--minutes", o->minutes, "Minutes to run [1]")
                      ->check(CLI::Range(0.0, 1e6))
                      ->type_name("N");
  auto* cases =
      command->add_option("--cases", o->cases, "Number of cases to run, instead of a time")
          ->check(CLI::Range(std::int64_t{1}, std::numeric_limits<std::int64_t>::max()))
          ->type_name("N");
  auto* only = command->add_option("--case", o->only, "Run only this case")
                   ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()))
                   ->type_name("N");
  minutes->excludes(cases)->excludes(only);
  cases->excludes(only);
  command->add_option("--seed", o->seed, "Seed that cases are drawn from [1]")->type_name("S");
  const auto one_of_ranks = [](const std::string& text) -> std::string {
    return text == "random" ? "" : CLI::Range(1, 8).operator()(const_cast<std::string&>(text));
  };
  auto* ranks = command->add_option("--ranks", o->ranks, "1 to 8 threads, or random [random]")
                    ->check(one_of_ranks)
                    ->type_name("N|random");
  command->add_option("--comm", o->comm, "How ranks are connected [threads]")
      ->check(CLI::IsMember({"threads", "mpi"}));
  add_device_options(command, o->options.device, "Where to compute [cpu]");
  command->add_option("--break-case", o->options.broken_case)->group("");
  command->footer(
      "The seed, the case's number and the ranks determine a case: a failure prints the command "
      "that repeats it. SIGINT and SIGTERM end the run after the current case and print the "
      "totals.\nWith --comm mpi, ranks are killed only under mpirun --mca "
      "orte_allowed_exit_without_sync 1, because they end without MPI_Finalize.\nExit codes: 0 all "
      "checks passed, 1 a check failed, 2 wrong usage.");
  command->callback([o, ranks] {
    if (o->comm != "threads" && ranks->count() > 0) {
      throw CLI::ValidationError("--ranks",
                                 "with --comm " + o->comm + ", set the number by mpirun -n");
    }
    const LaunchOptions most_ranks{o->comm, std::max(1, o->num_ranks())};
    require_sound(o->options.device, most_ranks);
    prepare_environment(o->options.device, most_ranks);
    if (!soak(*o)) throw CLI::RuntimeError(1);
  });
}

}  // namespace switchyard::cli
