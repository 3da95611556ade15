// SPDX-License-Identifier: Apache-2.0
#include "inspect/inspect_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>

#include "common/printable.h"
#include "json_line.h"

namespace switchyard::cli {
namespace {

using nlohmann::json;
using train::printable;

std::string in_units(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string counted(std::size_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

constexpr std::size_t kMostListed = 64;  // sizes or prefixes in a rank's line

std::string shortened(const std::string& text) {
  constexpr std::size_t kMost = 100;
  const auto most = fmt::format("{:.{}}", text, int{kMost});
  return printable(most) + (most == text ? "" : fmt::format("… ({} bytes)", text.size()));
}

std::size_t num_characters(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0U) != 0x80U;
  }));
}

// Returns the width of a column: that of its longest text, up to a limit.
template <typename Lines, typename Text>
std::size_t width_of(const Lines& lines, const Text& text) {
  constexpr std::size_t kMost = 80;
  std::size_t width = 0;
  for (const auto& line : lines) width = std::max(width, num_characters(text(line)));
  return std::min(width, kMost);
}

std::string shape_of(const TensorInfo& info) {
  return fmt::format("[{}]", fmt::join(info.shape, ", "));
}

void print_files(const InspectReport& report) {
  fmt::print("\nFiles\n");
  const auto width = width_of(report.files, [](const auto& file) { return file.path; });
  for (const auto& file : report.files) {
    fmt::print("  {:<{}}  {:>7} tensors  {:>10}", printable(file.path), width, file.num_tensors,
               in_units(file.bytes));
    if (file.num_unlisted > 0) fmt::print("  ({} more not in the index)", file.num_unlisted);
    fmt::print("\n");
  }
}

void print_metadata(const InspectReport& report) {
  if (report.metadata.empty()) return;
  fmt::print("\nMetadata\n");
  for (const auto& [key, value] : report.metadata) {
    fmt::print("  {}: {}\n", shortened(key), shortened(value));
  }
}

void print_tensors(const InspectReport& report) {
  fmt::print("\nTensors\n");
  const auto name = width_of(report.tensors, [](const auto& line) { return line.names.name; });
  const auto shape = width_of(report.tensors, [](const auto& line) { return shape_of(line.info); });
  for (const auto& [names, info] : report.tensors) {
    fmt::print("  {:<{}}  {:<8} {:<{}}  {:>10}", printable(names.name), name, printable(info.dtype),
               shape_of(info), shape, in_units(info.bytes * names.count));
    if (names.count > 1) fmt::print("  ({} × {})", names.count, in_units(info.bytes));
    if (!info.is_readable) fmt::print("  cannot be read");
    fmt::print("\n");
  }
}

std::string experts_of(const FoundBlock& block) {
  return block.is_whole() ? std::to_string(block.num_experts)
                          : fmt::format("{} of {}", block.num_held, block.num_experts);
}

std::string remark_on(const FoundBlock& block) {
  std::string remark = block.is_readable ? "" : "  cannot be read";
  if (block.missing.empty()) return remark;
  remark += fmt::format("  incomplete: no {}", printable(block.missing.front()));
  const auto others = block.missing.size() - 1;
  return others == 0 ? remark : fmt::format("{} and {} more", remark, others);
}

void print_blocks(const InspectReport& report) {
  if (report.blocks.empty()) {
    fmt::print("\nNo MoE blocks were found.\n");
    return;
  }
  fmt::print("\nMoE blocks\n");
  const auto width = std::max<std::size_t>(
      6, width_of(report.blocks, [](const auto& line) { return line.prefixes.name; }));
  fmt::print("  {:<{}} {:>9} {:>7} {:>7}  {:<8} {:<24} {:<11} {}\n", "prefix", width, "experts",
             "H", "I", "dtype", "layout", "router bias", "shared I");
  for (const auto& [prefixes, block] : report.blocks) {
    fmt::print("  {:<{}} {:>9} {:>7} {:>7}  {:<8} {:<24} {:<11} {}{}\n", printable(prefixes.name),
               width, experts_of(block), block.hidden, block.intermediate, printable(block.dtype),
               block.layout,
               block.bias.empty() ? "none" : fmt::format("{}", fmt::join(block.bias, ", ")),
               block.shared_intermediate == 0 ? "none" : std::to_string(block.shared_intermediate),
               remark_on(block));
  }
  if (report.num_optimizer_blocks > 0) {
    fmt::print("  Not listed: optimizer tensors of the same form, {} blocks.\n",
               report.num_optimizer_blocks);
  }
}

std::string text_of(const RankReads::Experts& experts) {
  const auto owned = experts.first == experts.last ? "none"
                     : experts.first + 1 == experts.last
                         ? std::to_string(experts.first)
                         : fmt::format("{}…{}", experts.first, experts.last - 1);
  return fmt::format("{} of {}", owned, experts.num_experts);
}

template <typename List>
std::size_t num_left_out(const List& list) {
  return list.size() - std::min(list.size(), kMostListed);
}

std::vector<RankReads::Experts> listed_experts(const RankReads& ranks, std::size_t rank) {
  std::vector<RankReads::Experts> result;
  for (std::size_t i = 0; i < std::min(ranks.sizes.size(), kMostListed); ++i) {
    result.push_back(ranks.experts_of(ranks.sizes[i], static_cast<std::int64_t>(rank)));
  }
  return result;
}

void print_ranks(const InspectReport& report) {
  const auto& ranks = report.ranks;
  if (ranks.expert_bytes.empty()) return;
  fmt::print("\nRanks\n  {:>5} {:>11} {:>12} {:>11}  {}\n", "rank", "of experts", "replicated",
             "reads", "experts");
  for (std::size_t rank = 0; rank < ranks.expert_bytes.size(); ++rank) {
    std::vector<std::string> experts;
    for (const auto& owned : listed_experts(ranks, rank)) experts.push_back(text_of(owned));
    if (num_left_out(ranks.sizes) > 0) {
      experts.push_back(fmt::format("and of {} other sizes", num_left_out(ranks.sizes)));
    }
    const auto bytes = ranks.expert_bytes[rank];
    fmt::print("  {:>5} {:>11} {:>12} {:>11}  {}\n", rank, in_units(bytes),
               in_units(report.replicated_bytes), in_units(bytes + report.replicated_bytes),
               fmt::join(experts, ", "));
  }
  if (report.not_counted.empty()) return;
  fmt::print("  Not counted, because they are incomplete: {}\n",
             printable(fmt::format("{}", fmt::join(report.not_counted, ", "))));
}

json to_json(const InspectReport::Tensors& line) {
  return {{"tensor", line.names.name},
          {"dtype", line.info.dtype},
          {"shape", line.info.shape},
          {"count", line.names.count},
          {"bytes", line.info.bytes * line.names.count},
          {"readable", line.info.is_readable}};
}

json to_json(const InspectReport::Blocks& line) {
  const auto& block = line.block;
  return {{"block", line.prefixes.name},
          {"count", line.prefixes.count},
          {"layout", block.layout},
          {"num_experts", block.num_experts},
          {"num_held", block.num_held},
          {"hidden", block.hidden},
          {"intermediate", block.intermediate},
          {"dtype", block.dtype},
          {"router_bias", block.bias},
          {"shared_intermediate", block.shared_intermediate},
          {"readable", block.is_readable},
          {"missing", std::span(block.missing).first(std::min(block.missing.size(), kMostListed))}};
}

json to_json(const RankReads::Experts& experts) {
  return {{"num_experts", experts.num_experts},
          {"first", experts.first},
          {"count", experts.last - experts.first}};
}

json rank_to_json(const InspectReport& report, std::size_t rank) {
  const auto& ranks = report.ranks;
  auto experts = json::array();
  for (const auto& owned : listed_experts(ranks, rank)) experts.push_back(to_json(owned));
  const auto not_counted =
      std::span(report.not_counted).first(std::min(report.not_counted.size(), kMostListed));
  return {{"rank", rank},
          {"experts", experts},
          {"sizes_not_listed", num_left_out(ranks.sizes)},
          {"expert_bytes", ranks.expert_bytes[rank]},
          {"replicated_bytes", report.replicated_bytes},
          {"bytes", ranks.expert_bytes[rank] + report.replicated_bytes},
          {"not_counted", not_counted},
          {"not_counted_not_listed", num_left_out(report.not_counted)}};
}

}  // namespace

void print_inspect_table(const InspectReport& report) {
  fmt::print("{}: {}, {}, {}\n", printable(report.path), counted(report.files.size(), "file"),
             counted(static_cast<std::size_t>(report.num_tensors), "tensor"),
             in_units(report.bytes));
  print_files(report);
  print_metadata(report);
  print_tensors(report);
  print_blocks(report);
  print_ranks(report);
}

void print_inspect_json(const InspectReport& report) {
  print_json_line({{"checkpoint", report.path},
                   {"files", report.files.size()},
                   {"tensors", report.num_tensors},
                   {"bytes", report.bytes},
                   {"metadata", report.metadata}});
  for (const auto& file : report.files) {
    print_json_line({{"file", file.path},
                     {"tensors", file.num_tensors},
                     {"not_in_index", file.num_unlisted},
                     {"bytes", file.bytes}});
  }
  for (const auto& line : report.tensors) print_json_line(to_json(line));
  for (const auto& line : report.blocks) print_json_line(to_json(line));
  for (std::size_t rank = 0; rank < report.ranks.expert_bytes.size(); ++rank) {
    print_json_line(rank_to_json(report, rank));
  }
}

}  // namespace switchyard::cli
