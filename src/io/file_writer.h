// SPDX-License-Identifier: Apache-2.0
// Writes files at given offsets. Errors name the file, the operation and the system's reason.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard {

// An open file. Several writers may write different parts of one file at the same time. Every
// failure throws a StorageError that calls the file `name`.
class FileWriter {
 public:
  // Creates a new file. Fails if it already exists.
  static FileWriter create(const std::filesystem::path& path, const std::string& name);
  // Opens an existing file.
  static FileWriter open(const std::filesystem::path& path, const std::string& name);
  ~FileWriter();
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;

  // Extends the file to `bytes`, and allocates the disk space where the file system supports it.
  void reserve(std::int64_t bytes) const;
  void write(std::span<const std::byte> bytes, std::int64_t offset) const;
  // Writes the rows back to back, without the gaps between them.
  void write(const ConstTensorView& view, std::int64_t offset) const;
  // Returns when everything written to the file is on the disk.
  void sync() const;

 private:
  FileWriter(int descriptor, std::string name);

  int descriptor_ = -1;
  std::string name_;
};

// Repeats a system call while signals interrupt it, and returns its result.
template <typename Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Returns when the folder's entries are on the disk.
void sync_folder(const std::filesystem::path& path);

// Throws a StorageError: "cannot ACTION NAME: MESSAGE OF ERRNO".
[[noreturn]] void throw_storage_error(std::string_view action, std::string_view name);

}  // namespace switchyard
