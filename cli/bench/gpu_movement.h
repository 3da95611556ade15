// The bytes that movement between experts must read and write, whoever does it.
#pragma once

#include <cstdint>

namespace switchyard::cli {

// Counts over all ranks.
struct GpuMovement {
  std::int64_t num_tokens = 0;
  std::int64_t top_k = 1;
  // Tokens that each rank has for each, itself among them: what must arrive where a token goes to
  // a rank once.
  std::int64_t distinct_tokens = 0;
  std::int64_t row_bytes = 0;

  // Dispatch and combine_backward, where tokens arrive once and are found again by their rows.
  double scatter_bytes() const { return bytes(num_tokens + distinct_tokens); }
  // The same where every row is written.
  double scatter_rows_bytes() const { return bytes(num_tokens + num_tokens * top_k); }
  // Combine and dispatch_backward.
  double gather_bytes() const { return bytes(num_tokens + num_tokens * top_k); }

 private:
  double bytes(std::int64_t rows) const { return static_cast<double>(rows * row_bytes); }
};

}  // namespace switchyard::cli
