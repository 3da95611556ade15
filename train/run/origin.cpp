// SPDX-License-Identifier: Apache-2.0
#include "run/origin.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "run/resources.h"
#include "switchyard/build_info.h"
#include "switchyard/tensor.h"

namespace switchyard::train {
namespace {

constexpr std::size_t kHostBytes = 64;  // the longest host name of Linux

// Eight bytes a field, so that ranks can exchange it as numbers.
struct Process {
  std::array<char, kHostBytes> host{};
  std::int64_t id = 0;
  std::int64_t peak_bytes = 0;

  std::string host_name() const { return {host.data(), ::strnlen(host.data(), host.size())}; }
};

struct WorldRank {
  std::int64_t rank = 0;
};

struct Use {
  std::int64_t rows = 0;
  std::int64_t waited_for = 0;
  double waited_seconds = 0.0;
};

// Collective. Returns the records of all ranks, by rank.
template <typename Record>
std::vector<Record> gather(Communicator& comm, const Record& own) {
  constexpr std::size_t kNumbers = sizeof(Record) / sizeof(std::int64_t);
  using Numbers = std::array<std::int64_t, kNumbers>;
  auto sent = std::bit_cast<Numbers>(own);
  std::vector<Numbers> received(static_cast<std::size_t>(comm.size()));
  comm.all_gather(TensorView(sent.data(), {kNumbers}),
                  TensorView(received.data()->data(), {comm.size() * std::int64_t{kNumbers}}));
  std::vector<Record> records;
  for (const Numbers& numbers : received) records.push_back(std::bit_cast<Record>(numbers));
  return records;
}

Process this_process() {
  Process process{.id = ::getpid(), .peak_bytes = peak_memory()};
  ::gethostname(process.host.data(), process.host.size());
  return process;
}

std::string processor_text() {
  const auto name = cpu_name();
  return fmt::format("{}, {} hardware threads; products by {}", name.empty() ? "a CPU" : name,
                     std::thread::hardware_concurrency(), cpu_numerics());
}

// Ranks that are threads share a process.
std::vector<std::int64_t> peaks_of(const std::vector<Process>& process_of_rank) {
  std::vector<std::int64_t> peaks;
  std::set<std::pair<std::string, std::int64_t>> seen;
  for (const Process& process : process_of_rank) {
    if (!seen.emplace(process.host_name(), process.id).second) continue;
    peaks.push_back(process.peak_bytes);
  }
  return peaks;
}

}  // namespace

std::int64_t common_time(Communicator& world) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  std::int64_t seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  world.broadcast(TensorView(&seconds, {1}), 0);
  return seconds;
}

std::string cpu_name(const std::filesystem::path& root) {
  std::ifstream file(root / "proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return {};
}

std::string describe_hosts(const std::vector<std::string>& host_of_rank) {
  std::vector<std::pair<std::string, int>> ranks_of;
  for (const auto& host : host_of_rank) {
    const auto known =
        std::ranges::find(ranks_of, host, [](const auto& entry) { return entry.first; });
    if (known == ranks_of.end()) {
      ranks_of.emplace_back(host, 1);
    } else {
      ++known->second;
    }
  }
  if (ranks_of.size() == 1) return ranks_of[0].first;
  std::string text;
  for (const auto& [host, ranks] : ranks_of) {
    text += fmt::format("{}{} ({} rank{})", text.empty() ? "" : ", ", host, ranks,
                        ranks == 1 ? "" : "s");
  }
  return text;
}

RunOrigin gather_origin(Communicator& world, const Corpus& text, const Program& program,
                        std::int64_t began) {
  const auto process_of_rank = gather(world, this_process());
  std::vector<std::string> hosts;
  for (const Process& process : process_of_rank) hosts.push_back(process.host_name());
  return {.began = began,
          .written = common_time(world),
          .hosts = describe_hosts(hosts),
          .processor = processor_text(),
          .version = std::string(version()),
          .commit = program.commit,
          .command_line = program.command_line,
          .text = text.name(),
          .training_bytes = std::ssize(text.training()),
          .held_out_bytes = std::ssize(text.held_out()),
          .peak_bytes = peaks_of(process_of_rank)};
}

std::vector<RankUse> gather_use(Transformer& model) {
  const auto layers = model.moe_layers();
  if (layers.empty()) return {};
  Communicator& experts = layers[0]->communicator();
  Communicator& world = model.mesh().world();
  const auto world_ranks = gather(experts, WorldRank{world.rank()});
  Use own{.rows = model.moe_rows(), .waited_for = world.rank()};
  const auto& waits = model.moe_waits();
  for (std::size_t i = 0; i < waits.size(); ++i) {
    if (waits[i] <= own.waited_seconds) continue;
    own.waited_seconds = waits[i];
    own.waited_for = world_ranks[i].rank;
  }
  std::vector<RankUse> uses;
  for (const Use& use : gather(world, own)) {
    uses.push_back({.rows = use.rows,
                    .waited_seconds = use.waited_seconds,
                    .waited_for = static_cast<int>(use.waited_for)});
  }
  return uses;
}

}  // namespace switchyard::train
