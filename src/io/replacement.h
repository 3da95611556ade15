// What takes the place of a file or folder at once, when it is whole.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace switchyard {

// The name it has until then: hidden, beside `path`, and of this token's own.
std::filesystem::path temporary_beside(const std::filesystem::path& path, std::string_view token);
// Where what was there before is kept: ".NAME.old-TOKEN".
std::filesystem::path aside_of(const std::filesystem::path& path, std::string_view token);
// One that no other process or call has drawn.
std::string random_token();

// Whether something in a folder may be removed with it.
using MayRemove = std::function<bool(const std::filesystem::directory_entry&)>;
// Throws StorageError if a folder, which is called `name`, holds anything else.
void require_removable(const std::filesystem::path& folder, const std::string& name,
                       const MayRemove& may_remove);

// Removes what lies at temporary() in the end, unless it took its place. Whoever uses it makes a
// file or folder of that name.
class Replacement {
 public:
  // `path` without a slash at its end.
  Replacement(std::filesystem::path path, std::string_view token, MayRemove may_remove);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  // Puts it at `path`, with the mode of a file that was there, and returns when that is on the disk
  // and the old one is removed. What of an old folder must not be removed, or cannot be, stays at
  // aside_of(path, token). StorageError leaves what was there.
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

// How commit replaces where two names cannot be exchanged. `aside` then has what was at `path`. For
// a moment, no folder is there; a file always is.
void replace_in_two_steps(const std::filesystem::path& temporary, const std::filesystem::path& path,
                          const std::filesystem::path& aside);

}  // namespace switchyard
