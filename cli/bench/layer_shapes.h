// SPDX-License-Identifier: Apache-2.0
// The layers that are commonly compared. bench/gpu_shapes.py reads this list as well.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace switchyard::cli {

struct LayerShape {
  std::string_view name;
  std::int64_t num_tokens = 0, hidden = 0, intermediate = 0, num_experts = 0, top_k = 0;
};

inline constexpr LayerShape kCpuShapes[] = {
    {"small", 4096, 512, 512, 16, 2},
    {"fine", 4096, 512, 256, 64, 8},
};
// A slice has some of its model's experts, as one of several ranks does.
inline constexpr LayerShape kGpuShapes[] = {
    {"qwen3-30b", 16384, 2048, 768, 128, 8},
    {"olmoe", 16384, 2048, 1024, 64, 8},
    {"mixtral", 8192, 4096, 14336, 8, 2},
    {"dsv3-slice", 4096, 7168, 2048, 32, 8},
    {"gpt-oss", 8192, 2880, 2880, 128, 4},
    {"dsv2-lite", 16384, 2048, 1408, 64, 6},
    {"granite", 16384, 1536, 512, 40, 8},
    {"kimi-slice", 4096, 7168, 2048, 48, 8},
    {"qwen3-235b-half", 8192, 4096, 1536, 64, 8},
    {"scout", 8192, 5120, 8192, 16, 1},
    {"odd", 5000, 1048, 712, 24, 3},
    {"qwen3-next-like", 16384, 2048, 128, 512, 10},
};

// Calls `visit` with every shape.
template <typename Visit>
void for_each_layer_shape(const Visit& visit) {
  for (const LayerShape& shape : kCpuShapes) visit(shape);
  for (const LayerShape& shape : kGpuShapes) visit(shape);
}

// Returns null if there is no shape of that name.
inline const LayerShape* find_layer_shape(std::string_view name) {
  const LayerShape* found = nullptr;
  for_each_layer_shape([&](const LayerShape& shape) {
    if (shape.name == name) found = &shape;
  });
  return found;
}

inline std::string layer_shape_names() {
  std::string names;
  for_each_layer_shape([&](const LayerShape& shape) {
    if (!names.empty()) names += ", ";
    names += shape.name;
  });
  return names;
}

}  // namespace switchyard::cli
