// SPDX-License-Identifier: Apache-2.0
// Standard floating-point arithmetic, whatever modes the program has set for its threads: rounding
// to nearest, subnormals kept, no traps. Otherwise the results of ranks could silently differ.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace switchyard {

// Sets the modes of the current thread and restores the previous ones on destruction.
class StandardFloats {
 public:
#if defined(__x86_64__)
  StandardFloats() : before_(_mm_getcsr()) { _mm_setcsr(kStandard); }
  ~StandardFloats() { _mm_setcsr(before_); }
#else
  StandardFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardFloats() { std::fesetenv(&before_); }
#endif
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kStandard = 0x1f80;
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

}  // namespace switchyard
