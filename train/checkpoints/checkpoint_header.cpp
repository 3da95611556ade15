// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/checkpoint_header.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>

#include "checkpoints/checkpoint_folder.h"
#include "checkpoints/content_sum.h"
#include "model/model_size.h"
#include "options/limits.h"
#include "options/options.h"
#include "switchyard/build_info.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

// Increment when tensors, their names or the metadata fields change.
constexpr std::string_view kFormat = "1";
constexpr const char* kFormatField = "train.format";
constexpr const char* kVersionField = "train.version";
constexpr const char* kConfigField = "train.config";
constexpr const char* kStepField = "train.step";
constexpr const char* kPositionField = "train.position";
constexpr const char* kCorpusField = "train.corpus";
constexpr const char* kCorpusHashField = "train.corpus_hash";
constexpr const char* kParametersSumField = "train.parameters_sum";
constexpr const char* kTrainingSumField = "train.training_sum";
constexpr const char* kMetadataSumField = "train.metadata_sum";

std::string in_hex(std::uint64_t number) { return fmt::format("{:016x}", number); }

// Replaces invalid UTF-8. Metadata is JSON, but a file name may hold any bytes.
std::string as_utf8(const std::string& text) {
  using Json = nlohmann::json;
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace))
      .get<std::string>();
}

const std::string& field(const Metadata& metadata, const char* name) {
  const auto found = metadata.find(name);
  if (found == metadata.end()) throw InvalidArgument(fmt::format("it has no {}", name));
  return found->second;
}

// Parses a non-negative number that fits T.
template <typename T>
T number(const Metadata& metadata, const char* name, int base = 10) {
  const auto& text = field(metadata, name);
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [next, error] = std::from_chars(text.data(), end, value, base);
  if (error != std::errc() || next != end || text.starts_with('-')) {
    throw InvalidArgument(fmt::format("{} must be a {}number, not \"{}\"", name,
                                      base == 16 ? "hexadecimal " : "", text));
  }
  return value;
}

TrainConfig config_from(const Metadata& metadata) {
  TrainConfig config;
  assign(config, parse_config(field(metadata, kConfigField), kConfigField));
  check(config.model);
  return config;
}

// Checks the position against the step: every step draws at least one window, and the batch size is
// limited.
Progress progress_from(const Metadata& metadata) {
  const Progress progress{.step = number<std::int64_t>(metadata, kStepField),
                          .position = number<std::int64_t>(metadata, kPositionField)};
  if (progress.step > kMostSteps) {
    throw InvalidArgument(
        fmt::format("{} must be at most {}, not {}", kStepField, kMostSteps, progress.step));
  }
  const auto most = progress.step * kLongest;
  if (progress.position < progress.step || progress.position > most) {
    throw InvalidArgument(fmt::format("{} must be {} to {} after {} steps, not {}", kPositionField,
                                      progress.step, most, progress.step, progress.position));
  }
  return progress;
}

CheckpointHeader parsed(const Metadata& metadata) {
  const auto hex = [&](const char* name) { return number<std::uint64_t>(metadata, name, 16); };
  CheckpointHeader header{.path = {},
                          .config = config_from(metadata),
                          .progress = progress_from(metadata),
                          .corpus = field(metadata, kCorpusField),
                          .corpus_hash = hex(kCorpusHashField),
                          .parameters_sum = hex(kParametersSumField),
                          .training_sum = hex(kTrainingSumField)};
  if (field(metadata, kMetadataSumField) != sum_of(metadata)) {
    throw InvalidArgument("its metadata does not match its checksum");
  }
  return header;
}

void require_our_format(const Metadata& metadata, const fs::path& path) {
  const auto format = metadata.find(kFormatField);
  if (format == metadata.end()) {
    throw InvalidArgument(
        fmt::format("{} is not a checkpoint of a training run: its metadata has no {}",
                    path.string(), kFormatField));
  }
  if (format->second == kFormat) return;
  const auto version = metadata.find(kVersionField);
  throw InvalidArgument(
      fmt::format("{} has format {} of Switchyard {}, but this is Switchyard {}, which reads "
                  "format {}",
                  path.string(), format->second, version == metadata.end() ? "?" : version->second,
                  switchyard::version(), kFormat));
}

fs::path newest_in(const fs::path& folder) {
  const auto all = list_checkpoints(folder);
  if (!all.empty()) return all.front();
  throw InvalidArgument(fmt::format("there is no checkpoint, such as {}, in the folder {}",
                                    checkpoint_path({}, 400).string(), folder.string()));
}

// Returns the bytes of the model's parameters, without the tensors that only training needs.
std::int64_t bytes_of_parameters(const Checkpoint& checkpoint) {
  std::int64_t bytes = 0;
  for (const auto& name : checkpoint.names()) {
    const bool is_of_training = name.starts_with(kOptimizerPrefix) ||
                                name.starts_with("balancer.") || name.starts_with("history.");
    if (!is_of_training) bytes += checkpoint.file_of(name).info(name).bytes;
  }
  return bytes;
}

// Rejects a config that describes a much larger model than the file holds, before that much memory
// is allocated. If at most half is missing, loading fails later and names the tensor.
void require_held(const Checkpoint& checkpoint, const ModelConfig& model) {
  const auto needed = size_of(model).bytes;
  const auto held = bytes_of_parameters(checkpoint);
  constexpr std::int64_t kLittle = 1 << 20;
  if (needed / 2 <= held || needed <= kLittle) return;
  throw InvalidArgument(fmt::format(
      "its options describe a model of {} bytes, but its parameters have {}", needed, held));
}

Checkpoint open_checkpoint(const fs::path& file) {
  try {
    return Checkpoint::open(file);
  } catch (const InvalidArgument& error) {
    std::error_code ignored;
    if (!fs::exists(file, ignored)) {
      throw InvalidArgument(fmt::format("{} was removed while it was being read", file.string()));
    }
    const std::string_view what = error.what();
    if (what.starts_with("cannot open")) throw;  // says nothing about the contents
    throw DamagedCheckpoint(words_for_damage(file, what));
  }
}

CheckpointHeader header_of(const fs::path& file) {
  const auto checkpoint = open_checkpoint(file);
  auto header = header_from(checkpoint.metadata(), file);
  try {
    require_held(checkpoint, header.config.model);
  } catch (const InvalidArgument& error) {
    throw DamagedCheckpoint(words_for_damage(file, error.what()));
  }
  header.file = checkpoint;
  return header;
}

}  // namespace

// Sums over the "train." fields, except the sum itself. Other fields, such as "format", are not
// ours.
std::string sum_of(const Metadata& metadata) {
  std::uint64_t sum = 0;
  for (const auto& [name, value] : metadata) {
    if (!name.starts_with("train.") || name == kMetadataSumField) continue;
    sum += content_hash(name, std::as_bytes(std::span(value)));
  }
  return in_hex(sum);
}

Metadata to_metadata(const CheckpointHeader& header) {
  Metadata metadata{{kFormatField, std::string(kFormat)},
                    {kVersionField, std::string(version())},
                    {kConfigField, to_json(header.config)},
                    {kStepField, std::to_string(header.progress.step)},
                    {kPositionField, std::to_string(header.progress.position)},
                    {kCorpusField, as_utf8(header.corpus)},
                    {kCorpusHashField, in_hex(header.corpus_hash)},
                    {kParametersSumField, in_hex(header.parameters_sum)},
                    {kTrainingSumField, in_hex(header.training_sum)}};
  metadata[kMetadataSumField] = sum_of(metadata);
  return metadata;
}

CheckpointHeader header_from(const Metadata& metadata, const fs::path& path) {
  require_our_format(metadata, path);
  try {
    auto header = parsed(metadata);
    header.path = path;
    return header;
  } catch (const InvalidArgument& error) {
    throw DamagedCheckpoint(words_for_damage(path, error.what()));
  }
}

CheckpointHeader read_header(const fs::path& path) {
  std::error_code ignored;
  const auto status = fs::status(path, ignored);
  if (!fs::exists(status)) {
    throw InvalidArgument(fmt::format("there is no checkpoint {}", path.string()));
  }
  if (!fs::is_directory(status)) return header_of(path);
  // Retry if the file has vanished: a run that saves here removes old checkpoints only after
  // writing newer ones.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  for (;;) {
    const auto newest = newest_in(path);
    try {
      return header_of(newest);
    } catch (const InvalidArgument&) {
      if (std::chrono::steady_clock::now() > deadline || fs::exists(newest, ignored)) throw;
    }
  }
}

}  // namespace switchyard::train
