// SPDX-License-Identifier: Apache-2.0
// The number of rows in a rank's buffers.
#pragma once

#include <cstdint>

#include "switchyard/export.h"

namespace switchyard {

// The policy for a rank that needs more rows than a bounded plan has room for.
enum class Overflow {
  fail,  // check() throws the same error on every rank; rows beyond the capacity are not moved
  // Every expert of the rank keeps rows up to a common level at which all of them fit, and the
  // remaining room is given to the experts in turn. Beyond that, an expert's highest tokens are
  // dropped and counted, without renormalising weights. The result depends on the number of ranks.
  drop,
};

// The policy that determines the number of rows in a rank's buffers.
class SWITCHYARD_API Sizing {
 public:
  // As many rows as the routing needs.
  static Sizing exact() { return {}; }
  // `capacity` rows on every rank, whatever the routing, and room for `token_capacity` tokens; 0:
  // as many as rows. The capacity must be a multiple of the alignment and less than 2³¹.
  static Sizing bounded(std::int64_t capacity, Overflow overflow = Overflow::fail,
                        std::int64_t token_capacity = 0) {
    Sizing sizing;
    sizing.capacity_ = capacity;
    sizing.token_capacity_ = token_capacity;
    sizing.overflow_ = overflow;
    sizing.is_bounded_ = true;
    return sizing;
  }

  bool is_bounded() const { return is_bounded_; }
  std::int64_t capacity() const { return capacity_; }
  // The number of tokens that a rank has room to receive, where a token goes to a rank once
  // (MoverKind::peer). Every received token has at least one row there, so a token capacity equal
  // to the row capacity never overflows before the rows do.
  std::int64_t token_capacity() const { return token_capacity_ != 0 ? token_capacity_ : capacity_; }
  Overflow overflow() const { return overflow_; }

 private:
  std::int64_t capacity_ = 0;
  std::int64_t token_capacity_ = 0;
  Overflow overflow_ = Overflow::fail;
  bool is_bounded_ = false;
};

}  // namespace switchyard
