// SPDX-License-Identifier: Apache-2.0
// The bytes that any implementation of dispatch and combine must read and write.
#pragma once

#include <cstdint>

namespace switchyard::cli {

// All counts are over all ranks.
struct GpuMovement {
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 1;
  // Tokens sent, summed over all pairs of ranks, including a rank with itself. A token counts once
  // for each rank that it goes to.
  std::int64_t distinct_tokens = 0;
  std::int64_t row_bytes = 0;

  // Dispatch and combine_backward, if tokens arrive once and rows refer to them.
  double scatter_bytes() const { return bytes(num_tokens + distinct_tokens); }
  // Dispatch and combine_backward, if every row is written.
  double scatter_rows_bytes() const { return bytes(num_tokens + num_tokens * top_k); }
  // Combine and dispatch_backward.
  double gather_bytes() const { return bytes(num_tokens + num_tokens * top_k); }

 private:
  double bytes(std::int64_t rows) const { return static_cast<double>(rows * row_bytes); }
};

}  // namespace switchyard::cli
