// SPDX-License-Identifier: Apache-2.0
#include "io/replacement.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>
#include <utility>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/file_writer.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostOfName = 200;  // a file name may have 255 bytes

fs::path hidden_beside(const fs::path& path, std::string_view mark, std::string_view token) {
  const auto name = path.filename().string().substr(0, kMostOfName);
  return path.parent_path() / fmt::format(".{}.{}-{}", name, mark, token);
}

bool rename_to(const fs::path& from, const fs::path& to) {
  return retried([&] { return std::rename(from.c_str(), to.c_str()); }) == 0;
}

bool exchange(const fs::path& a, const fs::path& b) {
  return retried([&] {
           return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE);
         }) == 0;
}

bool is_unsupported(int reason) {
  return reason == EINVAL || reason == ENOSYS || reason == EOPNOTSUPP;
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(fs::symlink_status(path, ignored));
}

// Throws if one is a folder and the other is not, since RENAME_EXCHANGE would swap them anyway.
void require_same_kind(const fs::path& temporary, const fs::path& path) {
  struct stat ignored = {};
  const bool both =
      ::lstat(temporary.c_str(), &ignored) == 0 && ::lstat(path.c_str(), &ignored) == 0;
  if (!both || is_folder(temporary) == is_folder(path)) return;
  errno = is_folder(path) ? EISDIR : ENOTDIR;
  throw_storage_error("replace", path.string());
}

// Copies the old file's permissions to the new one. Best effort: a failure does not stop the
// replacement.
void keep_mode(const fs::path& temporary, const fs::path& path) {
  constexpr mode_t kPermissions = 07777;
  struct stat old = {};
  if (::stat(path.c_str(), &old) != 0 || !S_ISREG(old.st_mode) || is_folder(temporary)) return;
  [[maybe_unused]] const int ignored = ::chmod(temporary.c_str(), old.st_mode & kPermissions);
}

}  // namespace

fs::path temporary_beside(const fs::path& path, std::string_view token) {
  return hidden_beside(path, "tmp", token);
}

fs::path aside_of(const fs::path& path, std::string_view token) {
  return hidden_beside(path, "old", token);
}

std::string random_token() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

void require_removable(const fs::path& folder, const std::string& name,
                       const MayRemove& may_remove) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    require<StorageError>(may_remove(*at),
                          "{} holds {}, which is not part of a checkpoint and would be lost; "
                          "choose another folder",
                          name, in_quotes(at->path().filename().string()));
  }
  require<StorageError>(!error, "cannot list the folder {}: {}", name, error.message());
}

Replacement::Replacement(fs::path path, std::string_view token, MayRemove may_remove)
    : path_(std::move(path)),
      temporary_(temporary_beside(path_, token)),
      aside_(aside_of(path_, token)),
      may_remove_(std::move(may_remove)) {}

Replacement::~Replacement() {
  std::error_code ignored;  // a failed removal does not affect what is at path_
  if (owns_temporary_) fs::remove_all(temporary_, ignored);
}

void replace_in_two_steps(const fs::path& temporary, const fs::path& path, const fs::path& aside) {
  // A file gets a second name by a hard link. A folder cannot have one, so it is moved.
  const bool is_linked = retried([&] { return ::link(path.c_str(), aside.c_str()); }) == 0;
  const bool is_aside = is_linked || rename_to(path, aside);
  if (!is_aside) throw_storage_error("move aside", path.string());
  if (rename_to(temporary, path)) return;
  const int reason = errno;
  rename_to(aside, path);
  ::unlink(aside.c_str());  // rename() does nothing if both names are one file
  errno = reason;
  throw_storage_error("replace", path.string());
}

// Returns where the old file or folder is now, or an empty path if there was none.
fs::path Replacement::put_in_place() const {
  if (exchange(temporary_, path_)) return temporary_;
  if (is_unsupported(errno)) {
    struct stat ignored = {};
    if (::lstat(path_.c_str(), &ignored) == 0) {
      replace_in_two_steps(temporary_, path_, aside_);
      return aside_;
    }
  } else if (errno != ENOENT) {
    throw_storage_error("replace", path_.string());
  }
  if (!rename_to(temporary_, path_)) throw_storage_error("replace", path_.string());
  return {};
}

void Replacement::put_back(const fs::path& old) {
  if (old.empty()) {
    rename_to(path_, temporary_);
  } else if (old == temporary_) {
    owns_temporary_ = exchange(temporary_, path_);
    if (!owns_temporary_) rename_to(temporary_, aside_);
  } else if (!rename_to(old, path_)) {  // succeeds for a file, which rename() replaces
    rename_to(path_, temporary_);
    rename_to(old, path_);
  }
}

void Replacement::remove_old(const fs::path& old) const {
  std::error_code ignored;
  if (!is_folder(old)) {
    fs::remove(old, ignored);
    return;
  }
  for (fs::directory_iterator at(old, ignored), end; !ignored && at != end; at.increment(ignored)) {
    std::error_code of_this;
    if (may_remove_(*at)) fs::remove(at->path(), of_this);
  }
  if (::rmdir(old.c_str()) != 0) rename_to(old, aside_);
}

void Replacement::commit() {
  require_same_kind(temporary_, path_);
  if (is_folder(path_)) require_removable(path_, path_.string(), may_remove_);
  keep_mode(temporary_, path_);
  const auto old = put_in_place();
  try {
    sync_folder(path_.has_parent_path() ? path_.parent_path() : ".");
    // Checks again: an entry may have been added before the exchange, but none can be added now.
    if (is_folder(old)) require_removable(old, path_.string(), may_remove_);
  } catch (const StorageError&) {
    put_back(old);
    throw;
  }
  owns_temporary_ = false;
  if (!old.empty()) remove_old(old);
}

}  // namespace switchyard
