// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_writer.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "core/in_quotes.h"
#include "core/require.h"
#include "io/safetensors_header.h"

namespace switchyard {
namespace {

using Json = nlohmann::ordered_json;
using Tensors = std::map<std::string, TensorForm>;

constexpr std::size_t kAlignment = 64;

// Quotes text for a message. Invalid UTF-8 becomes replacement characters.
std::string readable(std::string_view text) {
  const auto quoted = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return fmt::format("{}", in_quotes(quoted.substr(1, quoted.size() - 2)));
}

bool is_utf8(std::string_view text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::type_error&) {
    return false;
  }
}

std::vector<const Tensors::value_type*> in_file_order(const Tensors& tensors) {
  std::vector<const Tensors::value_type*> order;
  for (const auto& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [](const auto* tensor) { return size_of(tensor->second.dtype); });
  return order;
}

std::vector<std::int64_t> extents_of(const Shape& shape) {
  std::vector<std::int64_t> extents;
  for (int i = 0; i < shape.rank(); ++i) extents.push_back(shape[i]);
  return extents;
}

}  // namespace

std::string TensorForm::to_string() const { return fmt::format("{} {}", name_of(dtype), shape); }

void require_tensor_name(std::string_view name) {
  require(name != kSafetensorsMetadata, "a tensor must not be named {}", name);
  require(is_utf8(name), "the tensor's name {} is not UTF-8", readable(name));
}

void require_metadata(const std::map<std::string, std::string>& metadata) {
  for (const auto& [key, value] : metadata) {
    require(is_utf8(key), "the metadata's key {} is not UTF-8", readable(key));
    require(is_utf8(value), "the metadata's {} is {}, which is not UTF-8", in_quotes(key),
            readable(value));
  }
}

SafetensorsLayout lay_out(const Tensors& tensors,
                          const std::map<std::string, std::string>& metadata) {
  require_metadata(metadata);
  SafetensorsLayout layout;
  Json header = Json::object();
  auto& entries = header.get_ref<Json::object_t&>();  // operator[] would search linearly
  if (!metadata.empty()) entries.emplace_back(std::string(kSafetensorsMetadata), metadata);
  std::int64_t end = 0;
  for (const auto* tensor : in_file_order(tensors)) {
    const auto& [name, form] = *tensor;
    require_tensor_name(name);
    const auto begin = end;
    end += form.bytes();
    layout.offsets[name] = begin;
    entries.emplace_back(name, Json{{"dtype", safetensors_name(form.dtype)},
                                    {"shape", extents_of(form.shape)},
                                    {"data_offsets", {begin, end}}});
  }
  std::string json = header.dump();
  std::uint64_t length = 0;
  const auto head = (sizeof(length) + json.size() + kAlignment - 1) / kAlignment * kAlignment;
  length = head - sizeof(length);
  require(length <= kMaxSafetensorsHeader,
          "the header of {} tensors would have {} bytes, but the limit is {}", tensors.size(),
          length, kMaxSafetensorsHeader);
  layout.head.assign(head, ' ');
  std::memcpy(layout.head.data(), &length, sizeof(length));
  json.copy(layout.head.data() + sizeof(length), json.size());
  for (auto& [name, offset] : layout.offsets) offset += static_cast<std::int64_t>(head);
  layout.bytes = static_cast<std::int64_t>(head) + end;
  return layout;
}

}  // namespace switchyard
