// SPDX-License-Identifier: Apache-2.0
#include "data/corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "data/embedded_text.h"
#include "switchyard/error.h"

namespace switchyard::train {
namespace {

namespace fs = std::filesystem;

constexpr std::uintmax_t kMostBytes = std::uintmax_t{4} << 30;
constexpr std::size_t kLongestChunk = 4096;
constexpr std::size_t kOneInHeldOut = 10;

[[noreturn]] void cannot_read(const fs::path& path, const std::error_code& error) {
  throw InvalidArgument(
      fmt::format("the corpus {} cannot be read: {}", path.string(), error.message()));
}

// Reads up to `most` bytes of the file.
std::string read_file(const fs::path& path, std::uintmax_t most) {
  errno = 0;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  std::string text;
  std::string piece(static_cast<std::size_t>(std::min<std::uintmax_t>(most, 1U << 20U)), '\0');
  while (file != nullptr && text.size() < most) {
    const auto n = std::fread(piece.data(), 1, piece.size(), file.get());
    text.append(piece, 0, n);
    if (n < piece.size()) break;
  }
  if (file == nullptr || std::ferror(file.get()) != 0) {
    cannot_read(path, {errno, std::generic_category()});
  }
  return text;
}

bool is_text(const fs::path& path) { return read_file(path, 8192).find('\0') == std::string::npos; }

// Returns the text files below a folder, sorted by path.
std::vector<fs::path> text_files(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with('.');
    if (hidden) entry.disable_recursion_pending();
    if (hidden || entry->is_symlink() || !entry->is_regular_file()) continue;
    if (is_text(entry->path())) files.push_back(entry->path());
  }
  if (error) cannot_read(folder, error);
  std::ranges::sort(files);
  return files;
}

void require_moderate_size(const fs::path& path, const std::vector<fs::path>& files) {
  std::uintmax_t bytes = 0;
  for (const auto& file : files) bytes += fs::file_size(file);
  if (bytes <= kMostBytes) return;
  throw InvalidArgument(fmt::format("the corpus {} has {} bytes, but must have at most {} (4 GiB)",
                                    path.string(), bytes, kMostBytes));
}

// FNV-1a.
std::uint64_t hash_of(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace

Corpus Corpus::embedded() {
  return {"the King James Bible (Genesis, Psalms, New Testament)", embedded_text()};
}

Corpus Corpus::read(const fs::path& path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (error) cannot_read(path, error);
  std::vector<fs::path> files{path};
  if (fs::is_directory(status)) {
    files = text_files(path);
  } else if (!fs::is_regular_file(status)) {
    throw InvalidArgument(
        fmt::format("the corpus {} is neither a file nor a folder", path.string()));
  }
  require_moderate_size(path, files);
  std::string text;
  for (const auto& file : files) text += read_file(file, kMostBytes);
  return {path.string(), text};
}

std::shared_ptr<const Corpus> shared_corpus(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<const Corpus>> held;
  const std::lock_guard lock(mutex);
  auto corpus = held[path].lock();
  if (corpus == nullptr) {
    corpus = std::make_shared<const Corpus>(path.empty() ? Corpus::embedded() : Corpus::read(path));
    std::erase_if(held, [](const auto& entry) { return entry.second.expired(); });
    held[path] = corpus;
  }
  return corpus;
}

// Cuts the text into chunks of 4 KiB, or of a twentieth of it if that is less, and holds out the
// last of every ten. Held-out text thus comes from everywhere, however little text there is.
Corpus::Corpus(std::string name, std::string_view text)
    : name_(std::move(name)), hash_(hash_of(text)) {
  const auto chunk = std::min(kLongestChunk, text.size() / (2 * kOneInHeldOut));
  if (chunk == 0) {
    throw InvalidArgument(
        fmt::format("the corpus {} has {} bytes of text, too few to train on", name_, text.size()));
  }
  for (std::size_t i = 0; i * chunk < text.size(); ++i) {
    const bool is_held_out = i % kOneInHeldOut == kOneInHeldOut - 1;
    (is_held_out ? held_out_ : training_) += text.substr(i * chunk, chunk);
  }
}

}  // namespace switchyard::train
