// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/scratch.h"

#include <algorithm>

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLine = 64;

Tensor bytes_of(std::int64_t bytes) { return Tensor({bytes / size_of(Dtype::i32)}, Dtype::i32); }

}  // namespace

void Scratch::reset() noexcept { release(0); }

void Scratch::release(std::int64_t mark) noexcept {
  while (!extras_.empty() && extras_.back().begin >= mark) extras_.pop_back();
  used_ = mark;
}

std::byte* Scratch::take_bytes(std::int64_t bytes) {
  bytes = (bytes + kLine - 1) / kLine * kLine;
  if (used_ == 0 && most_used_ > block_.bytes()) {
    block_ = Tensor();  // freed before the larger one is allocated
    block_ = bytes_of(most_used_);
  }
  const auto begin = used_;
  if (extras_.empty() && begin + bytes <= block_.bytes()) {
    used_ += bytes;
    return block_.data() + begin;
  }
  extras_.push_back({begin, bytes_of(bytes)});
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  return extras_.back().memory.data();
}

std::int64_t Scratch::bytes_held() const {
  std::int64_t bytes = block_.bytes();
  for (const Extra& extra : extras_) bytes += extra.memory.bytes();
  return bytes;
}

}  // namespace switchyard::cpu
