// How many rows a rank has room for.
#pragma once

#include <cstdint>

#include "switchyard/export.h"

namespace switchyard {

// The policy for a rank that needs more rows than a bounded plan has room for.
enum class Overflow {
  fail,  // check() throws the same error on every rank; rows beyond the capacity are not moved
  // Every expert of the rank keeps rows up to a common level at which all of them fit, and what is
  // left over goes to the experts in turn; beyond that an expert's highest tokens are dropped,
  // without renormalising weights, and counted. Depends on the number of ranks, and so gives up
  // equality of results between different numbers.
  drop,
};

// How many rows a rank's buffers have.
class SWITCHYARD_API Sizing {
 public:
  // What the routing needs.
  static Sizing exact() { return {}; }
  // `capacity` rows on every rank, whatever the routing, and room for `token_capacity` tokens; 0:
  // as many as rows.
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
  // Tokens that a rank has room to receive where tokens cross once (ranks on GPUs). Every one of
  // them has a row at least, so that as many as rows are enough where all rows find room.
  std::int64_t token_capacity() const { return token_capacity_ != 0 ? token_capacity_ : capacity_; }
  Overflow overflow() const { return overflow_; }

 private:
  std::int64_t capacity_ = 0;
  std::int64_t token_capacity_ = 0;
  Overflow overflow_ = Overflow::fail;
  bool is_bounded_ = false;
};

}  // namespace switchyard
