// Reads safetensors files: named tensors behind a JSON header, mapped rather than loaded.
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

// What a file says of a tensor.
struct TensorInfo {
  std::string dtype;  // as the file has it: "BF16", "F8_E4M3"
  std::vector<std::int64_t> shape;
  std::int64_t bytes = 0;  // in the file
  bool is_readable = false;
};

// Tensors by name.
struct NamedTensors : std::map<std::string, ConstTensorView> {
  using map::map;

  // Why a file's other tensors cannot be read, so that none is taken for missing.
  std::map<std::string, std::string> unreadable = {};
};

// A file that was opened and found whole: every tensor lies within it, and every byte behind the
// header belongs to exactly one. Only read, so threads may share it; copies share the mapping.
//
// Tensors of F32, BF16, F16, I32 and I64 with up to four extents can be read, and a scalar reads as
// [1]. Others are listed but not read.
class SWITCHYARD_API SafetensorsFile {
 public:
  // Reads the header and maps the rest: memory is used as tensors are read. InvalidArgument says
  // what is wrong with a file that cannot be opened or breaks the format. One that
  // is shortened meanwhile is a StorageError. It must not be shortened or written to while a view
  // of its tensors is in use: touching what is gone ends the process (SIGBUS).
  static SafetensorsFile open(const std::filesystem::path& path);
  // There is no move, which would leave no contents behind.
  SafetensorsFile(const SafetensorsFile&) = default;
  SafetensorsFile& operator=(const SafetensorsFile&) = default;

  const std::filesystem::path& path() const;
  // What the header holds under "__metadata__"; empty where it has none.
  const std::map<std::string, std::string>& metadata() const;
  // Of all tensors, ascending, including those that cannot be read.
  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  // Also of tensors that cannot be read. InvalidArgument if there is no such tensor.
  TensorInfo info(std::string_view name) const;

  // A contiguous view that keeps the mapping alive, also without this object. Where the file does
  // not align a tensor to its elements, the view is of a copy instead, made anew by every call.
  // InvalidArgument if there is no such tensor, Unsupported if it cannot be read.
  ConstTensorView tensor(std::string_view name) const;
  // tensor(name) of every tensor that can be read, and what tensor(name) says of the others.
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
