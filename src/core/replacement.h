// What takes the place of a file or folder at once, when it is whole.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace switchyard {

// The name it has until then: hidden, beside `path`, and of this token's own.
std::filesystem::path temporary_beside(const std::filesystem::path& path, std::string_view token);
// One that no other process or call has drawn.
std::string random_token();

// Removes what lies at temporary() in the end: what did not take its place, or what was there
// before it. Whoever uses it makes a file or folder of that name.
class Replacement {
 public:
  // `path` without a slash at its end.
  Replacement(std::filesystem::path path, std::string_view token);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  // Puts it at `path`, and returns when that is on the disk. StorageError leaves what was there.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
};

// How commit replaces a folder where two cannot be exchanged: for a moment, nothing is there.
void replace_in_two_steps(const std::filesystem::path& temporary,
                          const std::filesystem::path& path);

}  // namespace switchyard
