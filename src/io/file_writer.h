// Writes files at given places; errors name the file, what was tried and the system's reason.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "switchyard/tensor.h"

namespace switchyard {

// An open file. Several may write to different parts of one file at a time. Every failure is a
// StorageError that calls the file `name`.
class FileWriter {
 public:
  // A new file; that it exists already is a failure.
  static FileWriter create(const std::filesystem::path& path, const std::string& name);
  // One that exists.
  static FileWriter open(const std::filesystem::path& path, const std::string& name);
  ~FileWriter();
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;

  // Makes the file so long, with room on the disk for all of it where the file system can tell.
  void reserve(std::int64_t bytes) const;
  void write(std::span<const std::byte> bytes, std::int64_t offset) const;
  // Row after row, without what lies between them.
  void write(const ConstTensorView& view, std::int64_t offset) const;
  // Returns when all that this process wrote is on the disk.
  void sync() const;

 private:
  FileWriter(int descriptor, std::string name);

  int descriptor_ = -1;
  std::string name_;
};

// The result of a call of the system, made again while a signal interrupts it.
template <typename Call>
auto retried(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// Returns when the names in a folder are on the disk.
void sync_folder(const std::filesystem::path& path);

// "cannot ACTION NAME: what errno says"
[[noreturn]] void throw_storage_error(std::string_view action, std::string_view name);

}  // namespace switchyard
