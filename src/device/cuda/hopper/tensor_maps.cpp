// SPDX-License-Identifier: Apache-2.0
// Encodes tensor maps with the driver's function, looked up at run time.
#include "device/cuda/hopper/tensor_maps.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <vector>

namespace switchyard::cuda::hopper {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The library does not link libcuda, so that it also loads on machines without a driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  check(found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound,
        "cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kElementBytes = 2;

bool is_aligned(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0 && stride % 8 == 0;
}

struct Spacing {
  std::int64_t group_stride = 0;
  std::int64_t part_stride = 0;
};

std::int64_t elements_between(const MatrixRef& from, const MatrixRef& to) {
  const auto bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to.data) -
                                               reinterpret_cast<std::uintptr_t>(from.data));
  return bytes / kElementBytes;
}

// Returns the strides if the matrices form one tensor, and nullopt otherwise.
std::optional<Spacing> find_spacing(std::span<const MatrixRef> refs, std::int64_t groups,
                                    std::int64_t parts) {
  constexpr std::int64_t kTooFar = (std::int64_t{1} << 40) / kElementBytes;
  const MatrixRef& first = refs.front();
  const auto at = [&](std::int64_t part, std::int64_t group) -> const MatrixRef& {
    return refs[static_cast<std::size_t>(part * groups + group)];
  };
  const Spacing spacing = {groups > 1 ? elements_between(first, at(0, 1)) : 0,
                           parts > 1 ? elements_between(first, at(1, 0)) : 0};
  const auto fits = [](std::int64_t stride, std::int64_t extent) {
    return extent == 1 || (stride > 0 && stride < kTooFar);
  };
  if (!fits(spacing.group_stride, groups) || !fits(spacing.part_stride, parts)) return {};
  for (std::int64_t part = 0; part < parts; ++part) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const MatrixRef& ref = at(part, group);
      if (ref.row_stride != first.row_stride ||
          elements_between(first, ref) !=
              part * spacing.part_stride + group * spacing.group_stride) {
        return {};
      }
    }
  }
  return spacing;
}

}  // namespace

CUtensorMap tensor_map(const TensorLayout& tensor, int box_rows) {
  static const Encode encode = find_encode();
  const auto extent = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  // The stride of a dimension of extent one is never used; any valid value will do.
  const auto unused = (tensor.columns + 7) / 8 * 8;
  const auto bytes = [&](std::int64_t stride, std::int64_t of) {
    return extent((of == 1 ? unused : stride) * kElementBytes);
  };
  const std::array<cuuint64_t, 4> extents = {extent(tensor.columns), extent(tensor.rows),
                                             extent(tensor.groups), extent(tensor.parts)};
  const std::array<cuuint64_t, 3> strides = {bytes(tensor.row_stride, tensor.rows),
                                             bytes(tensor.group_stride, tensor.groups),
                                             bytes(tensor.part_stride, tensor.parts)};
  const std::array<cuuint32_t, 4> box = {kBoxColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const std::array<cuuint32_t, 4> steps = {1, 1, 1, 1};
  CUtensorMap map{};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(tensor.data),
             extents.data(), strides.data(), box.data(), steps.data(),
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(static_cast<int>(result), "cuTensorMapEncodeTiled");
  return map;
}

MatrixMaps matrix_maps(const GroupMatrices& matrices, int groups, int box_rows, Context& context) {
  TensorLayout tensor = {.columns = matrices.columns, .rows = matrices.rows};
  MatrixMaps maps;
  if (const auto spacing = find_spacing(matrices.refs, groups, matrices.parts)) {
    tensor.data = matrices.refs.front().data;
    tensor.row_stride = matrices.refs.front().row_stride;
    tensor.groups = groups;
    tensor.group_stride = spacing->group_stride;
    tensor.parts = matrices.parts;
    tensor.part_stride = spacing->part_stride;
    maps.whole = tensor_map(tensor, box_rows);
    return maps;
  }
  std::vector<CUtensorMap> table;
  table.reserve(matrices.refs.size());
  for (const MatrixRef& ref : matrices.refs) {
    tensor.data = ref.data;
    tensor.row_stride = ref.row_stride;
    table.push_back(tensor_map(tensor, box_rows));
  }
  maps.table = static_cast<const CUtensorMap*>(context.constant(std::as_bytes(std::span(table))));
  return maps;
}

bool can_map(const Rows& rows) { return is_aligned(rows.data, rows.stride); }

bool can_map(const GroupMatrices& matrices) {
  return std::ranges::all_of(
      matrices.refs, [](const MatrixRef& ref) { return is_aligned(ref.data, ref.row_stride); });
}

}  // namespace switchyard::cuda::hopper
