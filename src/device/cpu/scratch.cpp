#include "device/cpu/scratch.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLine = 64;

Tensor bytes_of(std::int64_t bytes) { return Tensor({bytes / size_of(Dtype::i32)}, Dtype::i32); }

}  // namespace

void Scratch::reset() {
  if (!more_.empty()) {
    std::int64_t total = block_.bytes();
    for (const Tensor& tensor : more_) total += tensor.bytes();
    more_.clear();
    block_ = Tensor();
    block_ = bytes_of(total);
  }
  used_ = 0;
}

std::byte* Scratch::take_bytes(std::int64_t bytes) {
  bytes = (bytes + kLine - 1) / kLine * kLine;
  if (used_ + bytes <= block_.bytes()) {
    std::byte* piece = block_.data() + used_;
    used_ += bytes;
    return piece;
  }
  more_.push_back(bytes_of(bytes));
  return more_.back().data();
}

void Scratch::release(std::int64_t mark) { used_ = mark; }

}  // namespace switchyard::cpu
