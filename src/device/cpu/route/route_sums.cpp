#include "device/cpu/route/route_sums.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <utility>

namespace switchyard::cpu {
namespace {

void add_to(std::int64_t& sum, std::int64_t value) {
  if (value != 0) std::atomic_ref(sum).fetch_add(value, std::memory_order_relaxed);
}

}  // namespace

PanelSums::PanelSums(const RouterSums* sums, std::int64_t top_k) : sums_(sums), top_k_(top_k) {
  if (sums != nullptr) row_.resize(static_cast<std::size_t>(2 * sums->num_experts + 1));
}

void PanelSums::add(std::int64_t token, const std::int32_t* ids, const float* scores,
                    float log_sum_exp) {
  if (sums_ == nullptr) return;
  const auto sequence = token / sums_->sequence_tokens;
  if (sequence != sequence_) flush();
  sequence_ = sequence;
  for (std::int64_t k = 0; k < top_k_; ++k) {
    if (0 <= ids[k] && ids[k] < sums_->num_experts) ++row_[static_cast<std::size_t>(ids[k])];
  }
  ++row_.back();
  if (sums_->wants_scores()) add_scores(scores);
  if (!wants_squares()) return;
  const double square = std::min(double{log_sum_exp} * log_sum_exp, RouterSums::kMostSquare);
  const double whole = std::floor(square);
  whole_ += static_cast<std::int64_t>(whole);
  fraction_ += static_cast<std::int64_t>((square - whole) / RouterSums::kUnit);
}

void PanelSums::add_scores(const float* scores) {
  const auto n = static_cast<std::size_t>(sums_->num_experts);
  double unit = RouterSums::kUnit;
  if (sums_->losses.scores == LossScores::shares) {
    unit *= std::accumulate(scores, scores + n, 1e-20F);
  }
  for (std::size_t e = 0; e < n; ++e) {
    row_[n + e] += static_cast<std::int64_t>(double{scores[e]} / unit);
  }
}

void PanelSums::flush() {
  if (sums_ == nullptr || row_.back() == 0) return;
  const auto row = sums_->by_sequence.slice(sequence_, sequence_ + 1).span<std::int64_t>();
  for (std::size_t i = 0; i < row_.size(); ++i) add_to(row[i], row_[i]);
  std::ranges::fill(row_, 0);
  const auto squares = sums_->squares.span<std::int64_t>();
  add_to(squares[0], std::exchange(whole_, 0));
  add_to(squares[1], std::exchange(fraction_, 0));
}

}  // namespace switchyard::cpu
