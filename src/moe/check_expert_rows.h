// Checks of the rows that experts are given, and of the groups that they are in.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/require.h"
#include "moe/check_tensors.h"
#include "switchyard/experts.h"

namespace switchyard {

// What all tensors of a call must fit.
struct ExpertRowChecks {
  const ExpertsOptions& options;
  Memory memory;
  std::int64_t rows = 0;
  const std::optional<TokenRows>& tokens;

  // Where rows come from: one of the two.
  void require_source(const ConstTensorView& given, bool reads_tokens) const {
    if (!tokens) return require_rows(given, options.hidden, "rows");
    require(!is_given(given), "rows {} were given, and tokens: experts read the one or the other",
            given.shape().to_string());
    require<Unsupported>(reads_tokens,
                         "these experts do not read rows from tokens (see Experts::reads_tokens): "
                         "give them the rows that Dispatcher::dispatch makes");
    require(tokens->top_k >= 1, "tokens.top_k ({}) must be positive", tokens->top_k);
    require_of_rows(tokens->row_sources, Dtype::i32, "tokens.row_sources");
    require_of_tokens(tokens->x, options.dtype, options.hidden, "tokens.x");
  }

  void require_rows(const ConstTensorView& view, std::int64_t width, std::string_view name) const {
    require(view.dtype() == options.dtype && view.shape().rank() == 2 && view.shape()[1] == width &&
                view.rows() >= rows,
            "{} is {} {}, but must be {} [{},{}] or more rows", name, name_of(view.dtype()),
            view.shape().to_string(), name_of(options.dtype), rows, width);
    require_memory(view, memory, name);
  }
  void require_d_out(const ConstTensorView& view) const {
    if (!tokens) return require_rows(view, options.hidden, "d_out");
    require_of_tokens(view, options.dtype, options.hidden, "d_out");
  }
  void require_row_weights(const std::optional<ConstTensorView>& view,
                           std::string_view name) const {
    if (!view) return;
    if (!tokens) return require_of_rows(*view, Dtype::f32, name);
    require_of_tokens(*view, Dtype::f32, tokens->top_k, name);
    require(view->is_contiguous(), "{} has row stride {}, but must be contiguous", name,
            view->row_stride());
  }

 private:
  // A number a row.
  void require_of_rows(const ConstTensorView& view, Dtype dtype, std::string_view name) const {
    require(view.dtype() == dtype && view.shape().rank() == 1 && view.rows() >= rows &&
                view.is_contiguous(),
            "{} is {} {}, but must be contiguous {} [{}] or more", name, name_of(view.dtype()),
            view.shape().to_string(), name_of(dtype), rows);
    require_memory(view, memory, name);
  }
  void require_of_tokens(const ConstTensorView& view, Dtype dtype, std::int64_t width,
                         std::string_view name) const {
    const Shape shape{tokens->x.rows(), width};
    require(view.dtype() == dtype && view.shape() == shape,
            "{} is {} {}, but for the tokens it must be {} {}", name, name_of(view.dtype()),
            view.shape().to_string(), name_of(dtype), shape.to_string());
    require_memory(view, memory, name);
  }
};

// What has as many rows as there are.
template <typename Input>
ConstTensorView row_extent(const Input& in) {
  return in.tokens ? in.tokens->row_sources : ConstTensorView(in.rows);
}

inline void require_groups(const RowGroups& groups, std::int64_t experts, Memory memory,
                           std::int64_t required_alignment) {
  require(groups.row_offsets.dtype() == Dtype::i32 && groups.group_rows.dtype() == Dtype::i32 &&
              groups.row_offsets.shape() == Shape{experts + 1} &&
              groups.group_rows.shape() == Shape{experts},
          "row_offsets is {} {} and group_rows {} {}, but for {} experts they must be i32 [{}] and "
          "i32 [{}]",
          name_of(groups.row_offsets.dtype()), groups.row_offsets.shape().to_string(),
          name_of(groups.group_rows.dtype()), groups.group_rows.shape().to_string(), experts,
          experts + 1, experts);
  require_memory(groups.row_offsets, memory, "row_offsets");
  require_memory(groups.group_rows, memory, "group_rows");
  require(groups.alignment > 0 && groups.alignment % required_alignment == 0,
          "groups are aligned to {} rows, but this device's experts need a multiple of {}",
          groups.alignment, required_alignment);
}

// The rows that groups in the host's memory reach to.
inline std::int64_t rows_of(const RowGroups& groups) {
  const auto offsets = groups.row_offsets.span<std::int32_t>();
  const auto rows = groups.group_rows.span<std::int32_t>();
  for (std::size_t e = 0; e < rows.size(); ++e) {
    require(0 <= offsets[e] && 0 <= rows[e] &&
                std::int64_t{rows[e]} <= std::int64_t{offsets[e + 1]} - offsets[e],
            "the group of local expert {} has {} rows, but begins at {} and the next at {}", e,
            rows[e], offsets[e], offsets[e + 1]);
  }
  return offsets.back();
}

}  // namespace switchyard
