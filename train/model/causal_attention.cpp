// SPDX-License-Identifier: Apache-2.0
// Computes scores for some heads and queries at a time, in blocks that skip most of the keys after
// a query. Backward recomputes the probabilities instead of keeping them.
#include "model/causal_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "model/row_math.h"

namespace switchyard::train {
namespace {

constexpr auto kAccumulate = GradientMode::accumulate;

constexpr std::int64_t kBlock = 64;                          // positions per product
constexpr std::int64_t kMostScores = std::int64_t{1} << 17;  // scores held at once, per thread

// Returns the end of the block that contains this position.
std::int64_t block_end(std::int64_t position) { return (position / kBlock + 1) * kBlock; }

// Rows first … last − 1 of a sequence, in the columns of one head. A pair is sequence · heads +
// head.
struct Rows {
  std::int64_t pair = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
};

// Returns `rows` of a view [batch · tokens, H].
template <typename View>
View head_rows(const View& view, std::int64_t batch, std::int64_t heads, const Rows& rows) {
  const auto tokens = view.rows() / batch;
  const auto size = view.shape()[1] / heads;
  return {view.row(rows.pair / heads * tokens + rows.first) +
              rows.pair % heads * size * size_of(view.dtype()),
          view.dtype(),
          {rows.last - rows.first, size},
          view.row_stride()};
}

// The extent of a query's row of scores: its keys, and the end of the block that holds the last of
// them.
struct Reach {
  std::int64_t keys = 0;
  std::int64_t block = 0;
};

// A unit of work: some queries of some pairs, each with all keys.
class Part {
 public:
  Part(const SequenceShard& shard, std::int64_t heads, const Rows& rows, std::int64_t last_pair)
      : shard_(shard), heads_(heads), rows_(rows), last_pair_(last_pair) {}

  std::int64_t num_rows() const { return (last_pair_ - rows_.pair) * (rows_.last - rows_.first); }
  // [rows of all pairs, length], uninitialised.
  Tensor scores() const { return {{num_rows(), shard_.length()}, Dtype::f32}; }
  template <typename View>
  View head(const View& view, const Rows& rows) const {
    return head_rows(view, shard_.batch(), heads_, rows);
  }
  // Returns the block of `scores` for `queries` and keys first_key … last_key − 1.
  TensorView block(Tensor& scores, const Rows& queries, std::int64_t first_key,
                   std::int64_t last_key) const {
    const auto row =
        (queries.pair - rows_.pair) * (rows_.last - rows_.first) + queries.first - rows_.first;
    return {scores.view().row(row) + first_key * size_of(Dtype::f32),
            Dtype::f32,
            {queries.last - queries.first, last_key - first_key},
            shard_.length()};
  }
  // Returns the query that a row of scores belongs to.
  Rows query(std::int64_t row) const {
    const auto count = rows_.last - rows_.first;
    const auto first = rows_.first + row % count;
    return {rows_.pair + row / count, first, first + 1};
  }
  Reach reach(const Rows& query) const {
    const auto position = shard_.offset() + query.first;
    return {position + 1, std::min(block_end(position), shard_.length())};
  }

  // Calls fn(queries, last_key) for each block of queries; their keys end at last_key.
  template <typename Fn>
  void for_each_query_block(const Fn& fn) const {
    for (auto pair = rows_.pair; pair < last_pair_; ++pair) {
      for (auto first = rows_.first; first < rows_.last;) {
        const auto last =
            std::min(block_end(shard_.offset() + first) - shard_.offset(), rows_.last);
        fn(Rows{pair, first, last}, shard_.offset() + last);
        first = last;
      }
    }
  }
  // Calls fn(keys, queries) for each block of keys, with the queries at or after the first key.
  template <typename Fn>
  void for_each_key_block(const Fn& fn) const {
    const auto end = shard_.offset() + rows_.last;
    for (auto pair = rows_.pair; pair < last_pair_; ++pair) {
      for (std::int64_t key = 0; key < end; key += kBlock) {
        fn(Rows{pair, key, std::min(key + kBlock, shard_.length())},
           Rows{pair, std::max(rows_.first, key - shard_.offset()), rows_.last});
      }
    }
  }

 private:
  const SequenceShard& shard_;
  std::int64_t heads_;
  Rows rows_;
  std::int64_t last_pair_;
};

// Calls fn(part) for all parts. How rows are cut does not depend on the number of threads, since
// gradients of keys are summed over these parts.
template <typename Fn>
void for_each_part(const Compute& compute, const SequenceShard& shard, std::int64_t heads,
                   const Fn& fn) {
  if (shard.num_tokens() == 0) return;
  const auto rows =
      std::min(std::max(kMostScores / shard.length() / kBlock * kBlock, kBlock), shard.count());
  const auto pairs_at_once = std::max<std::int64_t>(
      kMostScores * compute.device().num_threads() / (rows * shard.length()), 1);
  const auto pairs = shard.batch() * heads;
  for (std::int64_t pair = 0; pair < pairs; pair += pairs_at_once) {
    for (std::int64_t first = 0; first < shard.count(); first += rows) {
      fn(Part(shard, heads, {pair, first, std::min(first + rows, shard.count())},
              std::min(pair + pairs_at_once, pairs)));
    }
  }
}

float scale_of(const ConstTensorView& queries, std::int64_t heads) {
  const auto size = queries.shape()[1] / heads;
  return 1.0F / std::sqrt(static_cast<float>(size));
}

// Turns scores into probabilities. Keys of the block that come after the query get zeros.
void softmax_row(float* row, const Reach& reach, float scale) {
  const float inverse = 1.0F / exp_row(row, reach.keys, scale).sum;
  for (std::int64_t i = 0; i < reach.keys; ++i) row[i] *= inverse;
  std::fill(row + reach.keys, row + reach.block, 0.0F);
}

// Turns gradients of probabilities into those of scores: p · (d_p − Σ p · d_p) · scale.
void softmax_row_backward(const float* row, float* d_row, const Reach& reach, float sum,
                          float scale) {
  for (std::int64_t i = 0; i < reach.keys; ++i) d_row[i] = row[i] * (d_row[i] - sum) * scale;
  std::fill(d_row + reach.keys, d_row + reach.block, 0.0F);
}

void forward_part(Compute& compute, const CausalForward& args, const Part& part) {
  Tensor scores = part.scores();
  std::vector<Matmul> products;
  part.for_each_query_block([&](const Rows& queries, std::int64_t last_key) {
    products.push_back({.a = part.head(args.queries, queries),
                        .b = part.head(args.keys, {queries.pair, 0, last_key}),
                        .c = part.block(scores, queries, 0, last_key),
                        .b_layout = MatrixLayout::transposed});
  });
  compute.multiply(products);
  const float scale = scale_of(args.queries, args.heads);
  compute.for_each(part.num_rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto row = first; row < last; ++row) {
      softmax_row(row_of(scores.view(), row), part.reach(part.query(row)), scale);
    }
  });
  products.clear();
  part.for_each_query_block([&](const Rows& queries, std::int64_t last_key) {
    products.push_back({.a = part.block(scores, queries, 0, last_key),
                        .b = part.head(args.values, {queries.pair, 0, last_key}),
                        .c = part.head(args.mixed, queries)});
  });
  compute.multiply(products);
}

struct BackwardScores {
  Tensor probabilities;
  Tensor d_scores;
};

BackwardScores backward_scores(Compute& compute, const CausalBackward& args, const Part& part) {
  BackwardScores result{part.scores(), part.scores()};
  std::vector<Matmul> products;
  part.for_each_query_block([&](const Rows& queries, std::int64_t last_key) {
    const Rows keys{queries.pair, 0, last_key};
    products.push_back({.a = part.head(args.queries, queries),
                        .b = part.head(args.keys, keys),
                        .c = part.block(result.probabilities, queries, 0, last_key),
                        .b_layout = MatrixLayout::transposed});
    products.push_back({.a = part.head(args.d_mixed, queries),
                        .b = part.head(args.values, keys),
                        .c = part.block(result.d_scores, queries, 0, last_key),
                        .b_layout = MatrixLayout::transposed});
  });
  compute.multiply(products);
  const float scale = scale_of(args.queries, args.heads);
  compute.for_each(part.num_rows(), [&](std::int64_t first, std::int64_t last) {
    for (auto row = first; row < last; ++row) {
      const auto query = part.query(row);
      float* probabilities = row_of(result.probabilities.view(), row);
      softmax_row(probabilities, part.reach(query), scale);
      // Σ p · d_p over keys equals the dot product of the mixed values and their gradient.
      const auto mixed = part.head(args.mixed, query);
      const auto d_mixed = part.head(args.d_mixed, query);
      const float sum = dot_of(row_of(mixed, 0), row_of(d_mixed, 0), mixed.shape()[1]);
      softmax_row_backward(probabilities, row_of(result.d_scores.view(), row), part.reach(query),
                           sum, scale);
    }
  });
  return result;
}

void backward_part(Compute& compute, const CausalBackward& args, const Part& part) {
  auto scores = backward_scores(compute, args, part);
  std::vector<Matmul> products;
  part.for_each_query_block([&](const Rows& queries, std::int64_t last_key) {
    products.push_back({.a = part.block(scores.d_scores, queries, 0, last_key),
                        .b = part.head(args.keys, {queries.pair, 0, last_key}),
                        .c = part.head(args.d_queries, queries)});
  });
  const auto add_for_keys = [&](Tensor& a, const ConstTensorView& b, const TensorView& c) {
    part.for_each_key_block([&](const Rows& keys, const Rows& queries) {
      products.push_back({.a = part.block(a, queries, keys.first, keys.last),
                          .b = part.head(b, queries),
                          .c = part.head(c, keys),
                          .a_layout = MatrixLayout::transposed,
                          .mode = kAccumulate});
    });
  };
  add_for_keys(scores.d_scores, args.queries, args.d_keys);
  add_for_keys(scores.probabilities, args.d_mixed, args.d_values);
  compute.multiply(products);
}

}  // namespace

void causal_attention(Compute& compute, const CausalForward& args) {
  for_each_part(compute, args.shard, args.heads,
                [&](const Part& part) { forward_part(compute, args, part); });
}

void causal_attention_backward(Compute& compute, const CausalBackward& args) {
  for_each_part(compute, args.shard, args.heads,
                [&](const Part& part) { backward_part(compute, args, part); });
}

}  // namespace switchyard::train
