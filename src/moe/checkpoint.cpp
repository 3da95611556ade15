// Finds the files of a checkpoint and what each of their tensors is called.
#include "switchyard/checkpoint.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>
#include <system_error>
#include <utility>

#include "core/in_quotes.h"
#include "core/mapped_file.h"
#include "core/require.h"
#include "core/safetensors_index.h"

namespace switchyard {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::int64_t kMaxIndex = 100'000'000;  // as of a header, which has more to say

struct Found {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsFile> files;
  std::map<std::string, std::size_t, std::less<>> places;  // of a tensor's file in `files`
};

struct Folder {
  std::vector<fs::path> indexes;
  std::vector<fs::path> files;
};

Folder list(const fs::path& path) {
  Folder result;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (name.starts_with('.')) continue;
    if (name.ends_with(kIndexSuffix)) result.indexes.push_back(entry->path());
    if (name.ends_with(kFileSuffix)) result.files.push_back(entry->path());
  }
  require(!error, "cannot list the folder {}: {}", path.string(), error.message());
  std::ranges::sort(result.indexes);
  std::ranges::sort(result.files);
  return result;
}

// The first few, so that a folder of thousands fits a message.
std::string names_of(const std::vector<fs::path>& paths) {
  constexpr std::size_t kMost = 8;
  std::vector<std::string> names;
  for (const auto& path : paths) {
    if (names.size() == kMost) {
      names.push_back(fmt::format("{} more", paths.size() - kMost));
      break;
    }
    names.push_back(fmt::format("{}", in_quotes(path.filename().string())));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// Of a file that is in the index, for the tensor `name` among others.
SafetensorsFile open_beside(const fs::path& index, const std::string& file,
                            const std::string& name) {
  const auto path = index.parent_path() / file;
  std::error_code error;
  require(fs::exists(path, error), "{}: there is no file {} beside it, where tensor {} should be",
          index.string(), in_quotes(file), in_quotes(name));
  return SafetensorsFile::open(path);
}

Found open_index(const fs::path& path) {
  const std::string text = path.string();
  const auto mapping = map_file(text);
  require(mapping.bytes <= kMaxIndex, "{} has {} bytes, more than the limit of {} for an index",
          text, mapping.bytes, kMaxIndex);
  auto index = parse_safetensors_index(
      {reinterpret_cast<const char*>(mapping.data.get()), static_cast<std::size_t>(mapping.bytes)},
      text);
  Found result;
  result.metadata = std::move(index.metadata);
  std::map<std::string_view, std::string_view> first_tensors;
  for (const auto& [name, file] : index.weight_map) first_tensors.emplace(file, name);
  std::map<std::string_view, std::size_t> place_of;
  for (const auto& [file, name] : first_tensors) {
    place_of.emplace(file, result.files.size());
    result.files.push_back(open_beside(path, std::string(file), std::string(name)));
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

Found open_files(const std::vector<fs::path>& paths) {
  Found result;
  for (const auto& path : paths) {
    const auto place = result.files.size();
    const auto& file = result.files.emplace_back(SafetensorsFile::open(path));
    for (auto& name : file.names()) {
      const auto [at, is_new] = result.places.try_emplace(std::move(name), place);
      if (is_new) continue;
      throw InvalidArgument(fmt::format("tensor {} is in {} and in {}, and there is no index",
                                        in_quotes(at->first),
                                        result.files[at->second].path().string(), path.string()));
    }
    if (place == 0) result.metadata = file.metadata();
    keep_common(result.metadata, file.metadata());
  }
  return result;
}

Found open_folder(const fs::path& path) {
  const auto folder = list(path);
  require(folder.indexes.size() <= 1, "{} has {} indexes: {}; open one of them", path.string(),
          folder.indexes.size(), names_of(folder.indexes));
  if (!folder.indexes.empty()) return open_index(folder.indexes.front());
  require(!folder.files.empty(), "{} has neither an index (*{}) nor a file *{}", path.string(),
          kIndexSuffix, kFileSuffix);
  return open_files(folder.files);
}

Found open_any(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return open_folder(path);
  return path.extension() == ".json" ? open_index(path) : open_files({path});
}

}  // namespace

struct Checkpoint::Contents {
  fs::path path;
  Found found;

  std::once_flag once = {};
  NamedTensors tensors = {};  // of `once`
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

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> result;
  for (const auto& [name, file] : contents_->found.places) result.push_back(name);
  return result;
}

const SafetensorsFile& Checkpoint::file_of(std::string_view name) const {
  const auto found = contents_->found.places.find(name);
  require(found != contents_->found.places.end(), "{} has no tensor {} among its {}",
          path().string(), in_quotes(name), contents_->found.places.size());
  return contents_->found.files[found->second];
}

const NamedTensors& Checkpoint::tensors() const {
  std::call_once(contents_->once, [this] {
    for (const auto& [name, place] : contents_->found.places) {
      const auto& file = contents_->found.files[place];
      if (file.info(name).is_readable) contents_->tensors.emplace(name, file.tensor(name));
    }
  });
  return contents_->tensors;
}

ConstTensorView Checkpoint::tensor(std::string_view name) const {
  return file_of(name).tensor(name);
}

}  // namespace switchyard
