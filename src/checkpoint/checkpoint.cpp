// SPDX-License-Identifier: Apache-2.0
// Finds the files of a checkpoint and the names of their tensors.
#include "switchyard/checkpoint.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>
#include <span>
#include <system_error>
#include <utility>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/mapped_safetensors.h"
#include "io/open_folder.h"
#include "io/safetensors_index.h"

namespace switchyard {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::int64_t kMaxIndex = 100'000'000;  // as for a header, which holds more per tensor

struct Found {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsFile> files;
  std::map<std::string, std::size_t, std::less<>> places;  // by tensor name: index into `files`
};

struct Listing {
  std::vector<std::string> indexes;
  std::vector<std::string> files;
};

Listing list(const OpenFolder& folder) {
  Listing result;
  for (auto& name : folder.names()) {
    if (name.starts_with('.')) continue;
    if (name.ends_with(kIndexSuffix)) result.indexes.push_back(name);
    if (name.ends_with(kFileSuffix)) result.files.push_back(std::move(name));
  }
  // A replaced folder is removed next, so its listing may be incomplete.
  require(!folder.is_replaced(), "{} was replaced while it was being listed",
          folder.path().string());
  return result;
}

// Lists the first few names only, so that a folder of thousands still fits in a message.
std::string words_for(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 8;
  std::vector<std::string> words;
  for (const auto& name : names) {
    if (words.size() == kMost) {
      words.push_back(fmt::format("{} more", names.size() - kMost));
      break;
    }
    words.push_back(fmt::format("{}", in_quotes(name)));
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

SafetensorsFile open_in(const OpenFolder& folder, const std::string& name) {
  return safetensors_in(folder.map(name), folder.path() / name);
}

Found open_index(const OpenFolder& folder, const std::string& own_name) {
  const std::string text = (folder.path() / own_name).string();
  const auto mapping = folder.map(own_name);
  require(mapping.bytes <= kMaxIndex, "{} has {} bytes, more than the limit of {} for an index",
          text, mapping.bytes, kMaxIndex);
  std::string json(static_cast<std::size_t>(mapping.bytes), '\0');
  FileReader(mapping, text).read(0, std::as_writable_bytes(std::span(json)));
  auto index = parse_safetensors_index(json, text);
  Found result;
  result.metadata = std::move(index.metadata);
  std::map<std::string_view, std::string_view> first_tensors;
  for (const auto& [name, file] : index.weight_map) first_tensors.emplace(file, name);
  std::map<std::string_view, std::size_t> place_of;
  for (const auto& [file, name] : first_tensors) {
    require(folder.has(std::string(file)),
            "{}: there is no file {} beside it, where tensor {} should be", text, in_quotes(file),
            in_quotes(name));
    place_of.emplace(file, result.files.size());
    result.files.push_back(open_in(folder, std::string(file)));
  }
  for (const auto& [name, file] : index.weight_map) {
    const auto place = place_of.at(file);
    require(result.files[place].contains(name),
            "{}: tensor {} should be in {}, which has no such tensor", text, in_quotes(name),
            in_quotes(file));
    result.places.emplace_hint(result.places.end(), name, place);
  }
  return result;
}

void keep_common(std::map<std::string, std::string>& metadata,
                 const std::map<std::string, std::string>& other) {
  std::erase_if(metadata, [&](const auto& entry) {
    const auto found = other.find(entry.first);
    return found == other.end() || found->second != entry.second;
  });
}

void add_file(Found& result, const SafetensorsFile& opened) {
  const auto place = result.files.size();
  const auto& file = result.files.emplace_back(opened);
  for (auto& name : file.names()) {
    const auto [at, is_new] = result.places.try_emplace(std::move(name), place);
    if (is_new) continue;
    throw InvalidArgument(
        fmt::format("tensor {} is in {} and in {}, and there is no index", in_quotes(at->first),
                    result.files[at->second].path().string(), file.path().string()));
  }
  if (place == 0) result.metadata = file.metadata();
  keep_common(result.metadata, file.metadata());
}

Found open_all(const OpenFolder& folder) {
  const auto path = folder.path().string();
  const auto [indexes, files] = list(folder);
  require(indexes.size() <= 1, "{} has {} indexes: {}; open one of them", path, indexes.size(),
          words_for(indexes));
  if (!indexes.empty()) return open_index(folder, indexes.front());
  require(!files.empty(), "{} has neither an index (*{}) nor a file *{}", path, kIndexSuffix,
          kFileSuffix);
  Found result;
  for (const auto& name : files) add_file(result, open_in(folder, name));
  return result;
}

// Retries if the folder was replaced meanwhile: files that went missing exist in the new one.
template <typename Open>
Found open_while_replaced(const fs::path& path, const Open& open) {
  constexpr int kMostTries = 16;
  for (int tries = 1;; ++tries) {
    const OpenFolder folder(path);
    try {
      return open(folder);
    } catch (const InvalidArgument&) {
      if (tries == kMostTries || !folder.is_replaced()) throw;
    }
  }
}

Found open_any(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return open_while_replaced(path, open_all);
  if (path.extension() == ".json") {
    return open_while_replaced(
        path.has_parent_path() ? path.parent_path() : ".",
        [&](const OpenFolder& folder) { return open_index(folder, path.filename().string()); });
  }
  Found result;
  add_file(result, SafetensorsFile::open(path));
  return result;
}

}  // namespace

struct Checkpoint::Contents {
  fs::path path;
  Found found;

  std::once_flag once = {};
  NamedTensors tensors = {};  // filled once, under `once`
};

Checkpoint::Checkpoint(std::shared_ptr<Contents> contents) : contents_(std::move(contents)) {}

Checkpoint Checkpoint::open(const fs::path& path) {
  auto contents = std::make_shared<Contents>();
  contents->path = path;
  contents->found = open_any(path);
  return Checkpoint(std::move(contents));
}

const fs::path& Checkpoint::path() const { return contents_->path; }

const std::map<std::string, std::string>& Checkpoint::metadata() const {
  return contents_->found.metadata;
}

const std::vector<SafetensorsFile>& Checkpoint::files() const { return contents_->found.files; }

std::vector<std::string> Checkpoint::names(std::string_view prefix) const {
  const auto& places = contents_->found.places;
  std::vector<std::string> result;
  for (auto at = places.lower_bound(prefix); at != places.end(); ++at) {
    if (!at->first.starts_with(prefix)) break;
    result.push_back(at->first);
  }
  return result;
}

const SafetensorsFile& Checkpoint::file_of(std::string_view name) const {
  const auto found = contents_->found.places.find(name);
  require(found != contents_->found.places.end(), "{} has no tensor {} among the {} it contains",
          path().string(), in_quotes(name), contents_->found.places.size());
  return contents_->found.files[found->second];
}

const NamedTensors& Checkpoint::tensors() const {
  std::call_once(contents_->once, [this] {
    auto& tensors = contents_->tensors;
    for (const auto& [name, place] : contents_->found.places) {
      try {
        tensors.emplace(name, contents_->found.files[place].tensor(name));
      } catch (const Unsupported& error) {
        tensors.unreadable.emplace(name, error.what());
      }
    }
  });
  return contents_->tensors;
}

ConstTensorView Checkpoint::tensor(std::string_view name) const {
  return file_of(name).tensor(name);
}

}  // namespace switchyard
