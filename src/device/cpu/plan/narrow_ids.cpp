// SPDX-License-Identifier: Apache-2.0
// Converts the caller's ids to i32 in one pass.
#include <algorithm>
#include <limits>

#include "device/cpu/kernels.h"

namespace switchyard::cpu {
namespace {

template <typename Id>
void narrow(const NarrowIds& args) {
  using Limits = std::numeric_limits<std::int32_t>;
  const auto top_k = args.from.shape()[1];
  std::int32_t* to = args.to.span<std::int32_t>().data();
  for (std::int64_t t = 0; t < args.from.rows(); ++t) {
    const auto* ids = reinterpret_cast<const Id*>(args.from.row(t));
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int64_t id = args.first_sentinel && ids[k] >= *args.first_sentinel ? -1 : ids[k];
      *to++ = static_cast<std::int32_t>(std::clamp<std::int64_t>(id, Limits::min(), Limits::max()));
    }
  }
}

}  // namespace

void narrow_ids(const NarrowIds& args) {
  args.from.dtype() == Dtype::i64 ? narrow<std::int64_t>(args) : narrow<std::int32_t>(args);
}

}  // namespace switchyard::cpu
