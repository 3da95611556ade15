// SPDX-License-Identifier: Apache-2.0
// wgmma: products of operands in shared memory.
#include <utility>

#include "emulation/machine.h"
#include "emulation/ptx.h"
#include "emulation/work.h"

namespace emulation {
namespace {

constexpr int kRows = 64;   // of a wgmma
constexpr int kDepth = 16;  // likewise
constexpr int kPiece = 8;   // elements that the swizzle keeps together
constexpr int kMostColumns = 256;

void unpack(const std::byte* from, float* to, int step) {
  std::uint16_t bits[kPiece];
  std::memcpy(bits, from, sizeof(bits));
  for (int i = 0; i < kPiece; ++i) {
    const std::uint32_t word = static_cast<std::uint32_t>(bits[i]) << 16;
    std::memcpy(to + i * step, &word, sizeof(word));
  }
}

// Reads the operand that a descriptor of wgmma gives, with the 128-byte swizzle: element (line, k)
// goes to to[k * kMostColumns + line].
void read_operand(const Block& block, std::uint64_t descriptor, bool is_across, int lines,
                  float* to) {
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3FFF) << 4;
  const auto leading = static_cast<std::uint32_t>(descriptor >> 16 & 0x3FFF) << 4;
  const auto eight = static_cast<std::uint32_t>(descriptor >> 32 & 0x3FFF) << 4;
  const auto at = [&](std::uint32_t linear) {
    return shared_in(block, linear ^ (linear >> 7 & 7) << 4, kPiece * sizeof(std::uint16_t));
  };
  if (is_across) {
    for (int k = 0; k < kDepth; ++k) {
      for (int line = 0; line < lines; line += kPiece) {
        unpack(at(start + line / 64 * leading + k / 8 * eight + k % 8 * 128 + line % 64 * 2),
               to + k * kMostColumns + line, 1);
      }
    }
    return;
  }
  for (int line = 0; line < lines; ++line) {
    for (int k = 0; k < kDepth; k += kPiece) {
      unpack(at(start + line / 8 * eight + line % 8 * 128 + k * 2), to + k * kMostColumns + line,
             kMostColumns);
    }
  }
}

}  // namespace

void run_product(Block& block, const Product& product) {
  static thread_local float left[kDepth * kMostColumns];
  static thread_local float right[kDepth * kMostColumns];
  static thread_local float sums[kRows][kMostColumns];
  read_operand(block, product.a, product.a_is_across, kRows, left);
  read_operand(block, product.b, product.b_is_across, product.columns, right);
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < product.columns; ++column) sums[row][column] = 0;
    for (int k = 0; k < kDepth; ++k) {
      const float factor = left[k * kMostColumns + row];
      for (int column = 0; column < product.columns; ++column) {
        sums[row][column] += factor * right[k * kMostColumns + column];
      }
    }
  }
  for (int t = 0; t < kGroupThreads; ++t) {
    float* const mine = product.sums[t];
    const int first_row = 16 * (t / 32) + t % 32 / 4;
    for (int i = 0; i < product.columns / 2; ++i) {
      const float sum = sums[first_row + i / 2 % 2 * 8][8 * (i / 4) + 2 * (t % 4) + i % 2];
      mine[i] = (product.continues ? mine[i] : 0.0F) + sum;
    }
  }
}

void multiply(int columns, float* sums, std::uint64_t a, std::uint64_t b, int continues,
              bool a_is_across, bool b_is_across) {
  Product mine{.a = a,
               .b = b,
               .a_is_across = a_is_across,
               .b_is_across = b_is_across,
               .continues = continues != 0,
               .columns = columns};
  mine.sums[self().number % kGroupThreads] = sums;
  Warpgroup& group = my_warpgroup();
  meet_warpgroup(&mine, [&](void** operands) {
    Product all = *static_cast<Product*>(operands[0]);
    for (int t = 0; t < kGroupThreads; ++t) {
      const auto& part = *static_cast<const Product*>(operands[t]);
      if (part.a != all.a || part.b != all.b || part.continues != all.continues ||
          part.columns != all.columns) {
        fail("the threads of a warpgroup ask for different products");
      }
      all.sums[t] = part.sums[t];
    }
    group.open.push_back(all);
    work_done().products += std::uint64_t{kRows} * kDepth * static_cast<unsigned>(columns);
  });
}

void commit_products() {
  Warpgroup& group = my_warpgroup();
  int mine = 0;
  Block& block = *self().block;
  meet_warpgroup(&mine, [&](void**) {
    group.committed.push_back(std::move(group.open));
    group.open.clear();
    if (!block.machine->is_eager) return;
    for (const Product& product : group.committed.back()) run_product(block, product);
    group.committed.back().clear();
  });
}

void finish_products(int pending) {
  // All threads of the warpgroup wait, and the products happen when all have come.
  Thread& thread = self();
  auto& committed = my_warpgroup().committed;
  int mine = 0;
  meet_warpgroup(&mine, [&](void**) {
    while (committed.size() > static_cast<std::size_t>(pending)) {
      for (const Product& product : committed.front()) run_product(*thread.block, product);
      committed.pop_front();
    }
  });
}

}  // namespace emulation
