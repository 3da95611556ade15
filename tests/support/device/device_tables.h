// SPDX-License-Identifier: Apache-2.0
// Fixture for tests of the plan functions on every device: inputs, and results as plain vectors.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "device/device_backend.h"
#include "support/compare.h"
#include "support/device/devices.h"

namespace switchyard::testing {

using Ints = std::vector<std::int32_t>;
using Words = std::vector<std::int64_t>;

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

template <typename T>
std::vector<T> values(const Tensor& tensor) {
  return {tensor.span<T>().begin(), tensor.span<T>().end()};
}

inline Words no_problems() { return {-1, -1, -1, -1, 0}; }

// Deals experts out to ranks round-robin.
inline Ints deal(int num_experts, int num_ranks) {
  Ints owners;
  for (int e = 0; e < num_experts; ++e) owners.push_back(e % num_ranks);
  return owners;
}

struct Counted {
  Ints counts;
  Ints distinct_tokens;
  Ints positions;
  Ints token_positions;
  Words problems;
};

struct CountProblem {
  const Tensor& ids;  // on the host
  Ints owners;
  int num_ranks = 1;
  bool allow_duplicates = false;
  std::int64_t columns_apart = 0;
  bool counts_tokens = true;  // and their positions
  Words problems = no_problems();
};

class DeviceTables : public OnDevices {
 protected:
  template <typename T>
  Tensor put_all(const std::vector<T>& all) const {
    return put(Tensor::from<T>({static_cast<std::int64_t>(all.size())}, all));
  }
  Tensor poisoned(std::int64_t count, Dtype dtype) const {
    Tensor host({count}, dtype);
    poison(host);
    return put(host);
  }

  // Puts the rows on the device with `columns` poisoned columns after each.
  Tensor put_apart(const Tensor& rows, std::int64_t columns) const {
    Tensor wide({rows.rows(), rows.shape()[1] + columns}, rows.dtype());
    poison(wide);
    for (std::int64_t t = 0; t < rows.rows(); ++t) {
      std::copy_n(rows.view().row(t), rows.view().row_bytes(), wide.view().row(t));
    }
    return put(wide);
  }
  // Returns a view without the extra columns.
  static ConstTensorView narrow(const Tensor& wide, const Shape& shape) {
    const ConstTensorView view = wide.view();
    return {view.data(), view.dtype(), shape, view.row_stride(), view.owner(), view.memory()};
  }

  Counted count(const CountProblem& p) const {
    const Tensor wide = put_apart(p.ids, p.columns_apart);
    const Tensor owners = put_all(p.owners);
    Tensor counts = poisoned(std::ssize(p.owners), Dtype::i32);
    Tensor distinct = poisoned(p.num_ranks, Dtype::i32);
    Tensor positions = poisoned(p.ids.shape().num_elements(), Dtype::i32);
    Tensor token_positions = poisoned(p.ids.shape().num_elements(), Dtype::i32);
    Tensor problems = put_all(p.problems);
    CountAssignments args{.expert_ids = narrow(wide, p.ids.shape()),
                          .owners = owners,
                          .allow_duplicates = p.allow_duplicates,
                          .counts = counts,
                          .distinct_tokens = distinct,
                          .positions = positions,
                          .problems = problems};
    if (p.counts_tokens) args.token_positions = token_positions;
    backend_of(device).count_assignments(args);
    return {values<std::int32_t>(get(counts)), values<std::int32_t>(get(distinct)),
            values<std::int32_t>(get(positions)), values<std::int32_t>(get(token_positions)),
            values<std::int64_t>(get(problems))};
  }
};

}  // namespace switchyard::testing
