// SPDX-License-Identifier: Apache-2.0
// Checks the arguments of public matrix products.
#include "switchyard/matmul.h"

#include <string>
#include <string_view>

#include "core/check_memory.h"
#include "core/overlap.h"
#include "core/require.h"
#include "device/device_backend.h"

namespace switchyard {
namespace {

bool is_matrix(const ConstTensorView& view) {
  return view.shape().rank() == 2 && (view.dtype() == Dtype::f32 || view.dtype() == Dtype::bf16);
}

// The extents of the logical matrix, whichever way it lies in memory.
struct Extents {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};
Extents extents_of(const ConstTensorView& view, MatrixLayout layout) {
  const auto& shape = view.shape();
  if (layout == MatrixLayout::plain) return {shape[0], shape[1]};
  return {shape[1], shape[0]};
}

// Makes all checks without building messages, since products may be small and many.
bool fits(const Matmul& product, Memory memory) {
  if (!is_matrix(product.a) || !is_matrix(product.b) || !is_matrix(product.c)) return false;
  const bool is_there =
      product.a.memory() == memory && product.b.memory() == memory && product.c.memory() == memory;
  if (!is_there) return false;
  const auto a = extents_of(product.a, product.a_layout);
  const auto b = extents_of(product.b, product.b_layout);
  const auto& c = product.c.shape();
  return product.a.dtype() == product.b.dtype() &&
         (product.c.dtype() == product.a.dtype() || product.c.dtype() == Dtype::f32) &&
         a.columns == b.rows && c[0] == a.rows && c[1] == b.columns &&
         !share_memory(product.a, product.c) && !share_memory(product.b, product.c);
}

std::string text_of(const ConstTensorView& view, MatrixLayout layout) {
  return view.shape().to_string() + (layout == MatrixLayout::plain ? "" : " transposed");
}

// Throws the error for a product that fits() rejects.
void explain(const Matmul& product, Memory memory, const std::string& where) {
  const auto require_matrix = [&](const ConstTensorView& view, std::string_view name) {
    require(is_matrix(view), "{}{} is {} {}, but must be a matrix of f32 or bf16", where, name,
            name_of(view.dtype()), view.shape());
    require_memory(view, memory, where + std::string(name));
  };
  require_matrix(product.a, "a");
  require_matrix(product.b, "b");
  require_matrix(product.c, "c");
  require(product.a.dtype() == product.b.dtype(),
          "{}a is {}, but b is {}: they must have the same dtype", where,
          name_of(product.a.dtype()), name_of(product.b.dtype()));
  require(product.c.dtype() == product.a.dtype() || product.c.dtype() == Dtype::f32,
          "{}c is {}, but must be f32 because a and b are", where, name_of(product.c.dtype()));
  const auto a = extents_of(product.a, product.a_layout);
  const auto b = extents_of(product.b, product.b_layout);
  require(a.columns == b.rows, "{}a is {} and b is {}: a has {} columns, but b has {} rows", where,
          text_of(product.a, product.a_layout), text_of(product.b, product.b_layout), a.columns,
          b.rows);
  require(product.c.shape() == Shape{a.rows, b.columns},
          "{}c is {}, but the product of a {} and b {} is [{},{}]", where, product.c.shape(),
          text_of(product.a, product.a_layout), text_of(product.b, product.b_layout), a.rows,
          b.columns);
  require_apart(product.a, product.c, where + "a and c");
  require_apart(product.b, product.c, where + "b and c");
}

}  // namespace

void matmul(const Device& device, const Matmul& product) { matmul(device, {&product, 1}); }

void matmul(const Device& device, std::span<const Matmul> products) {
  for (std::size_t i = 0; i < products.size(); ++i) {
    if (fits(products[i], device.memory())) continue;
    explain(products[i], device.memory(),
            products.size() == 1 ? "" : fmt::format("product {} of {}: ", i, products.size()));
  }
  backend_of(device).multiply(products);
}

}  // namespace switchyard
