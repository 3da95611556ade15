// SPDX-License-Identifier: Apache-2.0
// switchyard verify: recomputes recorded cases and compares the results.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include "comm_options.h"
#include "commands.h"
#include "device_choice.h"
#include "launch.h"
#include "switchyard/error.h"
#include "verify/golden_case.h"
#include "verify/golden_run.h"
#include "verify/verify_report.h"

namespace switchyard::cli {
namespace {

namespace fs = std::filesystem;

struct VerifyOptions {
  std::vector<fs::path> paths;  // files, or folders of *.safetensors
  std::string comm = "threads";
  std::chrono::seconds timeout = kDefaultTimeout;
  DeviceChoice device;
  std::vector<int> ranks = {1, 2, 4};  // as threads, for cases recorded without a number of ranks
  bool json = false;
};

// Returns a file itself, or the *.safetensors files of a folder, sorted by name.
std::vector<fs::path> files_of(const fs::path& path) {
  if (!fs::exists(path)) {
    throw InvalidArgument(fmt::format("there is no file or folder {}", path.string()));
  }
  if (!fs::is_directory(path)) return {path};
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  if (files.empty()) {
    throw InvalidArgument(fmt::format("the folder {} has no *.safetensors", path.string()));
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<GoldenCase> read_cases(const std::vector<fs::path>& paths) {
  std::vector<GoldenCase> cases;
  for (const auto& path : paths) {
    for (const auto& file : files_of(path)) cases.push_back(GoldenCase::read(file));
  }
  return cases;
}

std::vector<CaseReport> empty_reports(const std::vector<GoldenCase>& cases) {
  std::vector<CaseReport> reports;
  for (const auto& golden : cases) {
    reports.push_back({.name = golden.name()});
  }
  return reports;
}

// Returns the numbers of ranks to run a case with.
std::vector<int> sizes_of(const GoldenCase& golden, const std::vector<int>& ranks) {
  return golden.num_ranks() == 0 ? ranks : std::vector{golden.num_ranks()};
}

// Collective. Runs the cases that apply to this number of ranks.
void run_cases(Communicator& comm, const std::vector<GoldenCase>& cases,
               const std::vector<int>& ranks, const DeviceChoice& device,
               std::vector<CaseReport>& reports) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const auto sizes = sizes_of(cases[i], ranks);
    const bool wanted = std::find(sizes.begin(), sizes.end(), comm.size()) != sizes.end();
    if (!wanted) continue;
    for (const Division& division : cases[i].divisions(comm.size())) {
      reports[i].runs.push_back({.num_ranks = comm.size(),
                                 .variant = division.name,
                                 .result = run_golden_case(comm, cases[i], division, device)});
    }
  }
}

std::vector<CaseReport> verify_on_threads(const std::vector<GoldenCase>& cases,
                                          const VerifyOptions& options) {
  std::set<int> all_sizes;
  for (const auto& golden : cases) {
    const auto sizes = sizes_of(golden, options.ranks);
    all_sizes.insert(sizes.begin(), sizes.end());
  }
  auto reports = empty_reports(cases);
  for (const int size : all_sizes) {
    const auto run = [&](Communicator& comm, const DeviceChoice& device) {
      auto others = empty_reports(cases);  // discarded: all ranks have the same results
      run_cases(comm, cases, options.ranks, device, comm.rank() == 0 ? reports : others);
    };
    launch_on(options.device, {.comm = "threads", .ranks = size, .timeout = options.timeout}, run);
  }
  return reports;
}

std::vector<CaseReport> verify_on(Communicator& comm, const std::vector<GoldenCase>& cases,
                                  const DeviceChoice& device) {
  auto reports = empty_reports(cases);
  run_cases(comm, cases, {comm.size()}, device, reports);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (!reports[i].runs.empty()) continue;
    reports[i].skipped =
        fmt::format("recorded with ep {}, not {}", cases[i].num_ranks(), comm.size());
  }
  return reports;
}

void print(const std::vector<CaseReport>& reports, const VerifyOptions& options) {
  if (options.json) {
    print_verify_json(reports);
  } else {
    print_verify_table(reports);
  }
}

// Prints the results. Returns true if at least one case ran and none failed.
bool verify(const VerifyOptions& options) {
  const auto cases = read_cases(options.paths);
  if (options.comm == "threads") {
    const auto reports = verify_on_threads(cases, options);
    print(reports, options);
    return all_passed(reports);
  }
  bool passed = false;
  const LaunchOptions how{.comm = options.comm, .timeout = options.timeout};
  launch_on(options.device, how, [&](Communicator& comm, const auto& device) {
    const auto reports = verify_on(comm, cases, device);
    if (comm.rank() == 0) print(reports, options);
    // mpirun kills all ranks when one exits with an error, or, after a failed case, without having
    // finalised MPI, so ranks exit only after the output is written.
    std::fflush(stdout);
    comm.barrier();
    passed = all_passed(reports);
  });
  return passed;
}

}  // namespace

void add_verify_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "verify", "Repeat computations that other systems recorded, and compare the results");
  const auto o = std::make_shared<VerifyOptions>();
  command->add_option("PATH", o->paths, "Recorded cases (*.safetensors), or folders of them")
      ->required();
  auto* ranks = command
                    ->add_option("--ranks", o->ranks,
                                 "Numbers of ranks for the cases that do not fix one [1,2,4]")
                    ->delimiter(',')
                    ->allow_extra_args(false)
                    ->check(CLI::Range(1, 1024))
                    ->type_name("N,N,...");
  add_comm_options(command, o->comm, o->timeout);
  add_device_options(command, o->device,
                     "Where to compute; with cuda, ranks are spread over the GPUs [cpu]");
  command->add_flag("--json", o->json,
                    "Print one JSON object per tensor of a case, each on its own line");
  command->callback([o, ranks] {
    if (o->comm != "threads" && ranks->count() > 0) {
      throw CLI::ValidationError("--ranks",
                                 "with --comm " + o->comm + ", set the number by mpirun -n");
    }
    const LaunchOptions most_ranks{.comm = o->comm, .ranks = std::ranges::max(o->ranks)};
    require_sound(o->device, most_ranks);
    prepare_environment(o->device, most_ranks);
    if (!verify(*o)) throw CLI::RuntimeError(1);
  });
}

}  // namespace switchyard::cli
