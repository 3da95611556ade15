// SPDX-License-Identifier: Apache-2.0
// Reads safetensors files: named tensors behind a JSON header, memory-mapped rather than loaded.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "switchyard/export.h"
#include "switchyard/tensor.h"

namespace switchyard {

struct MappedFile;

// The description of a tensor in a file.
struct TensorInfo {
  std::string dtype;  // as the file spells it: "BF16", "F8_E4M3"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;  // size in the file
  bool is_readable = false;
};

// Tensors by name, in ascending order.
struct NamedTensors : std::map<std::string, ConstTensorView> {
  using map::map;

  // The reasons why other tensors of the file cannot be read, by name, so that these are not taken
  // for missing.
  std::map<std::string, std::string> unreadable = {};
};

// An open safetensors file that has been validated: every tensor lies within it, and every byte
// after the header belongs to exactly one tensor. The object is immutable, so threads may share it;
// copies share the mapping.
//
// Tensors of F32, BF16, F16, I32 and I64 with up to four extents can be read; a scalar is read as
// [1]. Other tensors are listed but cannot be read.
class SWITCHYARD_API SafetensorsFile {
 public:
  // Opens a file: reads the header and maps the rest, so memory is used only as tensors are read.
  // Throws InvalidArgument, with the reason, if the file cannot be opened or violates the format,
  // and StorageError if it is truncated meanwhile. The file must not be truncated or written to
  // while a view of its tensors is in use: accessing a truncated part ends the process with SIGBUS.
  static SafetensorsFile open(const std::filesystem::path& path);
  // Copied even when moved, because a move would leave an object without contents behind.
  SafetensorsFile(const SafetensorsFile&) = default;
  SafetensorsFile& operator=(const SafetensorsFile&) = default;

  const std::filesystem::path& path() const;
  // The contents of "__metadata__" in the header; empty if there is none.
  const std::map<std::string, std::string>& metadata() const;
  // Returns the names of all tensors in ascending order, including those that cannot be read.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  // Returns the description of a tensor, readable or not. Throws InvalidArgument if there is no
  // such tensor.
  TensorInfo info(std::string_view name) const;

  // Returns a contiguous view, which keeps the mapping alive even without this object. If the file
  // does not align the tensor to its element size, the view is of a copy, made anew by every call.
  // Throws InvalidArgument if there is no such tensor, Unsupported if it cannot be read.
  ConstTensorView tensor(std::string_view name) const;
  // Returns tensor(name) of every readable tensor, and the reasons why the others cannot be read.
  NamedTensors tensors() const;

 private:
  struct Contents;
  explicit SafetensorsFile(std::shared_ptr<const Contents> contents);
  friend SafetensorsFile safetensors_in(const MappedFile& mapping,
                                        const std::filesystem::path& path);
  friend const MappedFile& mapping_of(const SafetensorsFile& file);

  std::shared_ptr<const Contents> contents_;
};

}  // namespace switchyard
