// Keeps a host within some dozens of meetings of its GPU, so that it never waits inside of CUDA for
// a full queue.
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

  // So many meetings went onto the stream, which is not being captured.
  void add(std::int64_t meetings, CUstream_st* stream);

 private:
  static constexpr std::int64_t kMeetings = 8;

  std::int64_t num_meetings_ = 0;        // since the last event
  std::array<CUevent_st*, 5> passed_{};  // that the stream comes by, every kMeetings
  std::size_t next_ = 0;
};

}  // namespace switchyard::cuda
