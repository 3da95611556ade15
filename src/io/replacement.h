// SPDX-License-Identifier: Apache-2.0
// Replaces a file or folder in one step once its replacement is complete.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace switchyard {

// Returns the replacement's temporary name: hidden, beside `path`, and unique to the token.
std::filesystem::path temporary_beside(const std::filesystem::path& path, std::string_view token);
// Returns the name under which the old file or folder is kept: ".NAME.old-TOKEN".
std::filesystem::path aside_of(const std::filesystem::path& path, std::string_view token);
// Returns a random token, different for every process and call.
std::string random_token();

// Decides whether an entry of a folder may be removed with the folder.
using MayRemove = std::function<bool(const std::filesystem::directory_entry&)>;
// Throws StorageError if the folder holds an entry that must not be removed. Messages call the
// folder `name`.
void require_removable(const std::filesystem::path& folder, const std::string& name,
                       const MayRemove& may_remove);

// Replaces `path` by what the caller creates at temporary(). Removes temporary() on destruction
// unless it was committed.
class Replacement {
 public:
  // `path` must not end with a slash.
  Replacement(std::filesystem::path path, std::string_view token, MayRemove may_remove);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  // Moves temporary() to `path`. A file keeps the mode of the file it replaces. Returns when the
  // change is on the disk and the old file or folder is removed. Entries of an old folder that must
  // not or cannot be removed stay at aside_of(path, token). On a StorageError, `path` keeps its old
  // contents.
  void commit();

 private:
  std::filesystem::path put_in_place() const;
  void put_back(const std::filesystem::path& old);
  void remove_old(const std::filesystem::path& old) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  std::filesystem::path aside_;
  MayRemove may_remove_;
  bool owns_temporary_ = true;
};

// Moves `path` to `aside` and `temporary` to `path`; commit uses it where the file system cannot
// exchange two names. A folder is missing from `path` for a moment, a file never is.
void replace_in_two_steps(const std::filesystem::path& temporary, const std::filesystem::path& path,
                          const std::filesystem::path& aside);

}  // namespace switchyard
