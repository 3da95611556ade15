// Adds tokens to the sums that losses and statistics are made of.
#pragma once

#include <cstdint>
#include <vector>

#include "device/router_sums.h"

namespace switchyard::cpu {

// Collects a panel's tokens and adds them to the router's sums at once. For one thread at a time;
// several may add to the same sums.
class PanelSums {
 public:
  // Null sums: nothing is collected.
  PanelSums(const RouterSums* sums, std::int64_t top_k);
  ~PanelSums() { flush(); }
  PanelSums(const PanelSums&) = delete;
  PanelSums& operator=(const PanelSums&) = delete;

  bool wants_squares() const { return sums_ != nullptr && sums_->wants_squares(); }
  // ids [K], scores [E]; log_sum_exp counts where squares are wanted.
  void add(std::int64_t token, const std::int32_t* ids, const float* scores, float log_sum_exp);

 private:
  void add_scores(const float* scores);
  void flush();

  const RouterSums* sums_;
  std::int64_t top_k_;
  std::int64_t sequence_ = 0;
  std::vector<std::int64_t> row_;  // as a row of by_sequence
  std::int64_t whole_ = 0;
  std::int64_t fraction_ = 0;
};

}  // namespace switchyard::cpu
