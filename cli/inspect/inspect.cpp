// SPDX-License-Identifier: Apache-2.0
// switchyard inspect: shows what a checkpoint holds and what each rank would read of it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <memory>
#include <set>
#include <system_error>

#include "checkpoints/checkpoints.h"
#include "commands.h"
#include "inspect/inspect_report.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

struct InspectOptions {
  std::string path;
  int num_ranks = 0;  // 0: ranks are not reported
  bool all = false;   // lists every tensor instead of folding names
  bool json = false;
};

std::vector<FoldedName> names_in(const std::map<std::string, std::string>& kinds, bool all) {
  return all ? list_names(kinds) : fold_names(kinds);
}

void add_files(InspectReport& report, const Checkpoint& checkpoint, TensorInfos& infos) {
  std::map<std::string, std::size_t> places;
  for (const auto& file : checkpoint.files()) {
    places.emplace(file.path().string(), report.files.size());
    report.files.push_back({.path = file.path().filename().string(),
                            .num_unlisted = static_cast<std::int64_t>(file.names().size())});
  }
  for (const auto& name : checkpoint.names()) {
    const auto& file = checkpoint.file_of(name);
    auto& line = report.files[places.at(file.path().string())];
    const auto& info = infos.emplace(name, file.info(name)).first->second;
    line.bytes += info.bytes;
    ++line.num_tensors;
    --line.num_unlisted;
    report.bytes += info.bytes;
    ++report.num_tensors;
  }
}

void add_tensors(InspectReport& report, const TensorInfos& infos, bool all) {
  std::map<std::string, std::string> kinds;
  for (const auto& [name, info] : infos) {
    kinds.emplace(name, fmt::format("{} {} {}", info.dtype, info.shape, info.bytes));
  }
  for (auto& line : names_in(kinds, all)) {
    const auto& info = infos.at(line.first);
    report.tensors.push_back({std::move(line), info});
  }
}

void add_blocks(InspectReport& report, const std::vector<FoundBlock>& blocks, bool all) {
  std::map<std::string, std::string> kinds;
  std::map<std::string, const FoundBlock*> by_prefix;
  for (const auto& block : blocks) {
    if (block.is_optimizers()) {
      ++report.num_optimizer_blocks;
      continue;
    }
    kinds.emplace(
        block.prefix,
        fmt::format("{} {} {} {} {} {} {} {} {} {}", block.layout, block.num_experts,
                    block.num_held, block.hidden, block.intermediate, block.dtype, block.bias,
                    block.shared_intermediate, block.is_readable, block.missing));
    by_prefix.emplace(block.prefix, &block);
  }
  for (auto& line : names_in(kinds, all)) {
    const auto& block = *by_prefix.at(line.first);
    report.blocks.push_back({std::move(line), block});
  }
}

void add_ranks(InspectReport& report, const std::vector<FoundBlock>& blocks,
               const TensorInfos& infos, int num_ranks) {
  report.ranks = reads_of_ranks(blocks, num_ranks);
  std::set<std::string_view> of_experts;
  for (const auto& block : blocks) {
    of_experts.insert(block.expert_tensors.begin(), block.expert_tensors.end());
    if (!block.is_whole()) report.not_counted.push_back(block.prefix);
  }
  for (const auto& [name, info] : infos) {
    if (!of_experts.contains(name)) report.replicated_bytes += info.bytes;
  }
}

// Each tensor takes about a kilobyte here. The largest models have a tenth of this limit.
void require_few_tensors(const Checkpoint& checkpoint) {
  constexpr std::size_t kMostTensors = 500'000;
  const auto count = checkpoint.names().size();
  if (count <= kMostTensors) return;
  throw Unsupported(fmt::format("{} has {} tensors, and at most {} can be listed",
                                checkpoint.path().string(), count, kMostTensors));
}

// Returns the newest checkpoint if `path` is a folder of them, each being complete by itself;
// otherwise returns `path`.
std::filesystem::path checkpoint_at(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return path;
  const auto checkpoints = train::list_checkpoints(path);
  return checkpoints.empty() ? path : checkpoints.front();
}

void inspect(const InspectOptions& options) {
  const auto checkpoint = Checkpoint::open(checkpoint_at(options.path));
  require_few_tensors(checkpoint);
  InspectReport report;
  report.path = checkpoint.path().string();
  report.metadata = checkpoint.metadata();
  TensorInfos infos;
  add_files(report, checkpoint, infos);
  add_tensors(report, infos, options.all);
  const auto blocks = find_moe_blocks(infos);
  add_blocks(report, blocks, options.all);
  if (options.num_ranks > 0) add_ranks(report, blocks, infos, options.num_ranks);
  if (options.json) {
    print_inspect_json(report);
  } else {
    print_inspect_table(report);
  }
}

}  // namespace

void add_inspect_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "inspect",
      "Show what a checkpoint holds: files, tensors, MoE blocks, and what each rank reads");
  const auto o = std::make_shared<InspectOptions>();
  command
      ->add_option("PATH", o->path,
                   "A safetensors file, an index (*.safetensors.index.json), a folder with one of "
                   "these, or the folder that switchyard train saves to, for its newest checkpoint")
      ->required();
  command
      ->add_option("--ranks", o->num_ranks,
                   "Show which experts each of N ranks would own, in contiguous ranges, and what "
                   "it would read")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  command->add_flag("--all", o->all,
                    "List every tensor, instead of one line for all layers and experts");
  command->add_flag(
      "--json", o->json,
      "Print one JSON object per line: the checkpoint, files, tensors, blocks, ranks");
  command->callback([o] { inspect(*o); });
}

}  // namespace switchyard::cli
