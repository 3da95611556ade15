// SPDX-License-Identifier: Apache-2.0
// Maps safetensors files, checks that their tensors fit in them, and returns views of the tensors.
#include "switchyard/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/mapped_safetensors.h"
#include "io/safetensors_header.h"

namespace switchyard {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr std::int64_t kLengthBytes = 8;

std::string header_of(const MappedFile& mapping, const std::string& file) {
  require(mapping.bytes >= kLengthBytes,
          "{} has {} bytes, but a safetensors file begins with a length of {}", file, mapping.bytes,
          kLengthBytes);
  const FileReader reader(mapping, file);
  std::uint64_t length = 0;
  reader.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const auto available = static_cast<std::uint64_t>(mapping.bytes - kLengthBytes);
  require(length <= available, "{}: the header's length ({}) exceeds the {} bytes that follow",
          file, length, available);
  require(length <= kMaxSafetensorsHeader, "{}: the header's length ({}) exceeds the limit of {}",
          file, length, kMaxSafetensorsHeader);
  std::string header(length, '\0');
  reader.read(kLengthBytes, std::as_writable_bytes(std::span(header)));
  return header;
}

using Entries = decltype(SafetensorsHeader::entries);
using Named = Entries::value_type;

void check_shape(const Named& tensor, const std::string& file) {
  const auto& [name, entry] = tensor;
  // Zero extents count as 1, so that the product of any subset of the extents fits too.
  std::int64_t elements = 1;
  bool is_empty = false;
  for (const auto extent : entry.shape) {
    is_empty = is_empty || extent == 0;
    const auto factor = std::max<std::int64_t>(extent, 1);
    require(factor <= std::numeric_limits<std::int64_t>::max() / 8 / elements,
            "{}: tensor {} of shape [{}] has too many elements to address", file, in_quotes(name),
            fmt::join(entry.shape, ", "));
    elements *= factor;
  }
  if (is_empty) elements = 0;
  if (!entry.dtype) return;
  require(entry.end - entry.begin == elements * size_of(*entry.dtype),
          "{}: tensor {} has {} bytes, but {} of shape [{}] is {}", file, in_quotes(name),
          entry.end - entry.begin, entry.dtype_name, fmt::join(entry.shape, ", "),
          elements * size_of(*entry.dtype));
}

// Checks that tensors lie back to back, as the format demands: no byte belongs to two tensors, and
// none is hidden between them.
void check_layout(const Entries& entries, std::int64_t data_bytes, const std::string& file) {
  std::vector<const Named*> in_order;
  for (const auto& tensor : entries) {
    const auto& [name, entry] = tensor;
    require(entry.begin <= entry.end && entry.end <= data_bytes,
            "{}: tensor {} has data_offsets [{}, {}], which is not a range within {} bytes", file,
            in_quotes(name), entry.begin, entry.end, data_bytes);
    check_shape(tensor, file);
    in_order.push_back(&tensor);
  }
  const auto place = [](const Named* tensor) {
    return std::tuple(tensor->second.begin, tensor->second.end);
  };
  std::ranges::sort(in_order, {}, place);
  std::int64_t covered = 0;
  std::string_view before;
  for (const auto* tensor : in_order) {
    const auto& [name, entry] = *tensor;
    require(entry.begin >= covered,
            "{}: tensor {} begins at byte {}, within tensor {}, which ends at {}", file,
            in_quotes(name), entry.begin, in_quotes(before), covered);
    require(entry.begin == covered, "{}: bytes {} to {}, before tensor {}, belong to no tensor",
            file, covered, entry.begin, in_quotes(name));
    covered = entry.end;
    before = name;
  }
  require(covered == data_bytes, "{}: bytes {} to {}, at the end, belong to no tensor", file,
          covered, data_bytes);
}

bool is_readable(const SafetensorsEntry& entry) {
  return entry.dtype && entry.shape.size() <= Shape::kMaxRank;
}

// Returns why a tensor is not readable.
std::string reason_against(const Named& tensor, const std::string& file) {
  const auto& [name, entry] = tensor;
  if (!entry.dtype) {
    return fmt::format("{}: tensor {} is of dtype {}; F32, BF16, F16, I32 and I64 can be read",
                       file, in_quotes(name), in_quotes(entry.dtype_name));
  }
  return fmt::format("{}: tensor {} has {} extents; up to {} can be read", file, in_quotes(name),
                     entry.shape.size(), int{Shape::kMaxRank});
}

}  // namespace

struct SafetensorsFile::Contents {
  std::filesystem::path path;
  MappedFile mapping;
  const std::byte* data = nullptr;  // the first byte after the header
  SafetensorsHeader header = {};

  const Named& named(std::string_view name) const {
    const auto found = header.entries.find(name);
    require(found != header.entries.end(), "{} has no tensor {} among the {} it contains",
            path.string(), in_quotes(name), header.entries.size());
    return *found;
  }

  ConstTensorView view(const SafetensorsEntry& entry) const {
    const Shape shape = entry.shape.empty() ? Shape{1} : Shape(std::span(entry.shape));
    const std::byte* begin = data + entry.begin;
    const auto alignment = static_cast<std::uintptr_t>(size_of(*entry.dtype));
    if (reinterpret_cast<std::uintptr_t>(begin) % alignment == 0) {
      return {begin, *entry.dtype, shape, shape.row_elements(), mapping.data};
    }
    Tensor copy(shape, *entry.dtype);
    FileReader(mapping, path.string())
        .read(begin - mapping.data.get(), {copy.data(), static_cast<std::size_t>(copy.bytes())});
    return copy;
  }
};

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Contents> contents)
    : contents_(std::move(contents)) {}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  return safetensors_in(map_file(path.string()), path);
}

SafetensorsFile safetensors_in(const MappedFile& mapping, const std::filesystem::path& path) {
  const std::string file = path.string();
  SafetensorsFile::Contents contents{.path = path, .mapping = mapping};
  contents.mapping.descriptor = nullptr;  // a checkpoint may exceed the limit of open files
  std::int64_t data_begin = kLengthBytes;
  {
    const std::string json = header_of(mapping, file);
    data_begin += static_cast<std::int64_t>(json.size());
    contents.header = parse_safetensors_header(json, file);
  }
  check_layout(contents.header.entries, mapping.bytes - data_begin, file);
  contents.data = mapping.data.get() + data_begin;
  return SafetensorsFile(std::make_shared<const SafetensorsFile::Contents>(std::move(contents)));
}

const MappedFile& mapping_of(const SafetensorsFile& file) { return file.contents_->mapping; }

const std::filesystem::path& SafetensorsFile::path() const { return contents_->path; }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return contents_->header.metadata;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  for (const auto& [name, entry] : contents_->header.entries) result.push_back(name);
  return result;
}

TensorInfo SafetensorsFile::info(std::string_view name) const {
  const SafetensorsEntry& entry = contents_->named(name).second;
  return {entry.dtype_name, entry.shape, entry.end - entry.begin, is_readable(entry)};
}

bool SafetensorsFile::contains(std::string_view name) const {
  return contents_->header.entries.contains(name);
}

ConstTensorView SafetensorsFile::tensor(std::string_view name) const {
  const Named& tensor = contents_->named(name);
  if (!is_readable(tensor.second)) throw Unsupported(reason_against(tensor, path().string()));
  return contents_->view(tensor.second);
}

NamedTensors SafetensorsFile::tensors() const {
  NamedTensors result;
  const auto file = path().string();
  for (const auto& tensor : contents_->header.entries) {
    const auto& [name, entry] = tensor;
    if (is_readable(entry)) {
      result.emplace(name, contents_->view(entry));
    } else {
      result.unreadable.emplace(name, reason_against(tensor, file));
    }
  }
  return result;
}

}  // namespace switchyard
