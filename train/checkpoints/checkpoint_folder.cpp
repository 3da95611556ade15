// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/checkpoint_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <functional>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoints/checkpoints.h"
#include "switchyard/agreement.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kSuffix = ".safetensors";
constexpr std::string_view kSetAside = ".set-aside";
constexpr std::size_t kDigits = 8;

// Returns the step in a name such as "step-00000100.safetensors", or nullopt if the name has
// another form.
std::optional<std::int64_t> step_in(std::string_view name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  if (name.size() < kPrefix.size() + kDigits + kSuffix.size()) return std::nullopt;
  const auto digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  const bool all_digits = std::ranges::all_of(digits, [](char c) { return '0' <= c && c <= '9'; });
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), step);
  if (!all_digits || error != std::errc()) return std::nullopt;
  return step;
}

std::int64_t step_of(const fs::path& checkpoint) {
  return step_in(checkpoint.filename().string()).value_or(0);
}

bool is_leftover(const std::string& name) {
  const auto end = name.find(".tmp-");
  return name.starts_with('.') && end != std::string::npos &&
         step_in(std::string_view(name).substr(1, end - 1)).has_value();
}

template <typename Visit>
void for_each_file(const fs::path& folder, const Visit& visit) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    visit(*at);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw InvalidArgument(
        fmt::format("cannot list the folder {}: {}", folder.string(), error.message()));
  }
}

bool can_be_opened(const fs::path& path) {
  try {
    Checkpoint::open(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!error && ::access(folder.c_str(), W_OK | X_OK) != 0) {
    error.assign(errno, std::generic_category());
  }
  if (!error) return;
  throw StorageError(fmt::format("--save {}: cannot save there: {}; choose another folder, or none",
                                 folder.string(), error.message()));
}

struct OpenFile {
  explicit OpenFile(int opened) : number(opened) {}
  ~OpenFile() { ::close(number); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int number;
};

// Returns null if the file system does not support such locks.
FolderLock locked(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return nullptr;
  auto lock = std::make_shared<const OpenFile>(file);
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) return lock;
  if (errno != EWOULDBLOCK) return nullptr;
  throw InvalidArgument(fmt::format(
      "--save {}: another run is saving there; end it, or choose another folder", folder.string()));
}

bool is_in(const fs::path& path, const fs::path& folder) {
  std::error_code ignored;
  return fs::equivalent(fs::is_directory(path, ignored) ? path : folder_of(path), folder, ignored);
}

// Strips the leading path from a message of Checkpoint.
std::string_view without_path(std::string_view what, const std::string& path) {
  if (!what.starts_with(path)) return what;
  what.remove_prefix(path.size());
  what.remove_prefix(std::min(what.find_first_not_of(": "), what.size()));
  return what;
}

}  // namespace

fs::path folder_of(const fs::path& checkpoint) {
  return checkpoint.has_parent_path() ? checkpoint.parent_path() : fs::path(".");
}

fs::path checkpoint_path(const fs::path& folder, std::int64_t step) {
  return folder / fmt::format("{}{:0{}}{}", kPrefix, step, kDigits, kSuffix);
}

FolderLock prepare_folder(Communicator& world, const fs::path& folder, const fs::path& resumed) {
  FolderLock lock;
  agree(world, [&] {
    if (world.rank() != 0) return;
    make_folder(folder);
    lock = locked(folder);
    remove_leftovers(folder, lock == nullptr);
    const auto all = list_checkpoints(folder);
    if (all.empty() || (!resumed.empty() && is_in(resumed, folder))) return;
    throw InvalidArgument(
        fmt::format("--save {} holds checkpoints of another run, up to {}; continue that run with "
                    "--resume {}, or choose another folder",
                    folder.string(), all.front().filename().string(), folder.string()));
  });
  return lock;
}

std::vector<fs::path> list_checkpoints(const fs::path& folder) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  for_each_file(folder, [&](const fs::directory_entry& entry) {
    std::error_code ignored;
    const auto step = step_in(entry.path().filename().string());
    if (step && entry.is_regular_file(ignored)) found.emplace_back(*step, entry.path());
  });
  std::ranges::sort(found, std::greater<>());
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

void prune_checkpoints(const fs::path& folder, std::int64_t step, std::int64_t keep) {
  std::error_code ignored;
  auto left = std::max<std::int64_t>(keep, 1);
  for (const auto& path : list_checkpoints(folder)) {
    if (step_of(path) > step) {
      fs::rename(path, path.string() + std::string(kSetAside), ignored);
    } else if (left-- <= 0) {
      fs::remove(path, ignored);
    }
  }
}

void remove_leftovers(const fs::path& folder, bool others_may_save) {
  const auto limit = fs::file_time_type::clock::now() - std::chrono::hours(1);
  for_each_file(folder, [&](const fs::directory_entry& entry) {
    std::error_code ignored;
    if (!is_leftover(entry.path().filename().string())) return;
    const auto written = entry.last_write_time(ignored);
    const bool is_abandoned = !others_may_save || (!ignored && written < limit);
    if (is_abandoned) fs::remove(entry.path(), ignored);
  });
}

std::string words_for_damage(const fs::path& path, std::string_view what) {
  const auto folder = folder_of(path);
  auto others = list_checkpoints(folder);
  std::erase_if(others, [&](const fs::path& other) {
    return other.filename() == path.filename() || !can_be_opened(other);
  });
  const auto before = std::ranges::find_if(
      others, [&](const fs::path& other) { return step_of(other) < step_of(path); });
  std::string way_out = fmt::format("there is no other checkpoint in {}", folder.string());
  if (before != others.end()) {
    way_out = fmt::format("use the one before it, {}", before->string());
  } else if (!others.empty()) {
    way_out = fmt::format("use another, {}", others.front().string());
  }
  return fmt::format("{} is damaged: {}; {}", path.string(), without_path(what, path.string()),
                     way_out);
}

std::string words_for_last_good(const fs::path& folder, std::int64_t step) {
  std::vector<fs::path> all;
  try {
    all = list_checkpoints(folder);
  } catch (const InvalidArgument&) {  // the caller already has an error to report
  }
  const auto last = std::ranges::find_if(
      all, [&](const fs::path& path) { return step_of(path) < step && can_be_opened(path); });
  return last == all.end() ? fmt::format("there is no checkpoint in {} yet", folder.string())
                           : fmt::format("the last good checkpoint is {}", last->string());
}

}  // namespace switchyard::train
