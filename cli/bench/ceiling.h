// What the memory of this machine allows: passes that read and write as many rows as an operation
// does, but one after the other.
#pragma once

#include <cstdint>

#include "switchyard/tensor.h"

namespace switchyard::cli {

// from [n, H] is read once, and each row is written to K places of to [n · K, H], in K streams.
void one_read_many_writes(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);

// K streams of from [n · K, H] are read and added; to [n, H] is written once.
void many_reads_one_write(const ConstTensorView& from, const TensorView& to, std::int64_t top_k);

}  // namespace switchyard::cli
