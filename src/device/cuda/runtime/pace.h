// SPDX-License-Identifier: Apache-2.0
// Keeps the host at most a few dozen meetings ahead of its GPU, so that it never blocks inside CUDA
// on a full queue.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

struct CUevent_st;
struct CUstream_st;

namespace switchyard::cuda {

class Pace {
 public:
  Pace() = default;
  ~Pace();
  Pace(const Pace&) = delete;
  Pace& operator=(const Pace&) = delete;

  // Counts meetings that go onto the stream, and blocks while the host is too far ahead. The stream
  // must not be in a capture.
  void add(std::int64_t meetings, CUstream_st* stream);

 private:
  static constexpr std::int64_t kMeetings = 8;

  std::int64_t num_meetings_ = 0;        // since the last event
  std::array<CUevent_st*, 5> passed_{};  // ring of events, one recorded every kMeetings
  std::size_t next_ = 0;
};

}  // namespace switchyard::cuda
