// SPDX-License-Identifier: Apache-2.0
#include "support/reference/reference.h"

namespace switchyard::testing {
namespace {

float get(const Tensor& t, std::int64_t row, std::int64_t column) {
  const auto i = row * t.shape()[1] + column;
  return t.dtype() == Dtype::bf16 ? to_float(reinterpret_cast<const Bfloat16*>(t.data())[i])
                                  : reinterpret_cast<const float*>(t.data())[i];
}

void set(Tensor& t, std::int64_t row, std::int64_t column, float value) {
  const auto i = row * t.shape()[1] + column;
  if (t.dtype() == Dtype::bf16) {
    reinterpret_cast<Bfloat16*>(t.data())[i] = to_bfloat16(value);
  } else {
    reinterpret_cast<float*>(t.data())[i] = value;
  }
}

}  // namespace

ReferencePlan::ReferencePlan(const ExpertPlacement& placement,
                             const std::vector<Tensor>& ids_of_rank, std::int64_t alignment) {
  const int num_ranks = placement.num_ranks();
  top_k = ids_of_rank[0].shape()[1];
  row_offsets.resize(at(num_ranks));
  group_rows.resize(at(num_ranks));
  rows.resize(at(num_ranks));
  for (const Tensor& ids : ids_of_rank) {
    slots.emplace_back(at(ids.shape().num_elements()), -1);
    owners.emplace_back(at(ids.shape().num_elements()), -1);
  }
  for (int e = 0; e < placement.num_experts(); ++e) {
    const int owner = placement.owner(e);
    auto& buffer = rows[at(owner)];
    row_offsets[at(owner)].push_back(static_cast<std::int32_t>(buffer.size()));
    std::int32_t count = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const Tensor& ids = ids_of_rank[at(source)];
      for (std::int64_t t = 0; t < ids.rows(); ++t) {
        for (std::int64_t k = 0; k < top_k; ++k) {
          if (ids.span<std::int32_t>()[at(t * top_k + k)] != e) continue;
          slots[at(source)][at(t * top_k + k)] = static_cast<std::int32_t>(buffer.size());
          owners[at(source)][at(t * top_k + k)] = owner;
          buffer.push_back(Assignment{source, t, k});
          ++count;
        }
      }
    }
    group_rows[at(owner)].push_back(count);
    while (static_cast<std::int64_t>(buffer.size()) % alignment != 0) buffer.emplace_back();
  }
  for (int r = 0; r < num_ranks; ++r) {
    row_offsets[at(r)].push_back(static_cast<std::int32_t>(rows[at(r)].size()));
  }
}

Tensor reference_scatter(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                         const std::vector<Tensor>* scale) {
  const auto hidden = tokens[0].shape()[1];
  const auto& buffer = plan.rows[at(rank)];
  Tensor rows =
      Tensor::zeros({static_cast<std::int64_t>(buffer.size()), hidden}, tokens[0].dtype());
  for (std::size_t slot = 0; slot < buffer.size(); ++slot) {
    if (!buffer[slot]) continue;
    const Assignment& a = *buffer[slot];
    for (std::int64_t h = 0; h < hidden; ++h) {
      float value = get(tokens[at(a.source)], a.token, h);
      if (scale != nullptr) value *= get((*scale)[at(a.source)], a.token, a.k);
      set(rows, static_cast<std::int64_t>(slot), h, value);
    }
  }
  return rows;
}

Tensor reference_gather(const ReferencePlan& plan, int rank, const std::vector<Tensor>& rows,
                        const std::vector<Tensor>* weights, Dtype dtype, std::int64_t hidden) {
  const std::size_t source = at(rank);
  const auto num_tokens = static_cast<std::int64_t>(plan.slots[source].size()) / plan.top_k;
  Tensor tokens = Tensor::zeros({num_tokens, hidden}, dtype);
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      std::optional<float> total;
      for (std::int64_t k = 0; k < plan.top_k; ++k) {
        const auto slot = plan.slots[source][at(t * plan.top_k + k)];
        const auto owner = plan.owners[source][at(t * plan.top_k + k)];
        if (slot < 0) continue;
        float term = get(rows[at(owner)], slot, h);
        if (weights != nullptr) term *= get((*weights)[source], t, k);
        total = total ? *total + term : term;
      }
      set(tokens, t, h, total.value_or(0.0F));
    }
  }
  return tokens;
}

Tensor reference_dots(const ReferencePlan& plan, int rank, const std::vector<Tensor>& tokens,
                      const std::vector<Tensor>& rows) {
  const std::size_t source = at(rank);
  Tensor dots = Tensor::zeros({tokens[source].rows(), plan.top_k}, Dtype::f32);
  for (std::size_t i = 0; i < plan.slots[source].size(); ++i) {
    if (plan.slots[source][i] < 0) continue;
    const auto t = static_cast<std::int64_t>(i) / plan.top_k;
    double dot = 0.0;
    for (std::int64_t h = 0; h < tokens[source].shape()[1]; ++h) {
      dot += static_cast<double>(get(tokens[source], t, h)) *
             get(rows[at(plan.owners[source][i])], plan.slots[source][i], h);
    }
    dots.span<float>()[i] = static_cast<float>(dot);
  }
  return dots;
}

Tensor reference_scatter_scalars(const ReferencePlan& plan, int rank,
                                 const std::vector<Tensor>& scalars) {
  const auto& buffer = plan.rows[at(rank)];
  Tensor rows = Tensor::zeros({static_cast<std::int64_t>(buffer.size())}, Dtype::f32);
  for (std::size_t slot = 0; slot < buffer.size(); ++slot) {
    if (!buffer[slot]) continue;
    const Assignment& a = *buffer[slot];
    rows.span<float>()[slot] = get(scalars[at(a.source)], a.token, a.k);
  }
  return rows;
}

Tensor reference_gather_scalars(const ReferencePlan& plan, int rank,
                                const std::vector<Tensor>& row_scalars) {
  const std::size_t source = at(rank);
  const auto n = static_cast<std::int64_t>(plan.slots[source].size());
  Tensor scalars = Tensor::zeros({n / plan.top_k, plan.top_k}, Dtype::f32);
  for (std::size_t i = 0; i < plan.slots[source].size(); ++i) {
    if (plan.slots[source][i] < 0) continue;
    const auto& owner_rows = row_scalars[at(plan.owners[source][i])];
    scalars.span<float>()[i] = owner_rows.span<float>()[at(plan.slots[source][i])];
  }
  return scalars;
}

}  // namespace switchyard::testing
