// SPDX-License-Identifier: Apache-2.0
#include "core/without_signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>

namespace switchyard::without_signals_test {
namespace {

std::atomic<int> num_received = 0;

class BrokenPipes : public ::testing::Test {
 protected:
  BrokenPipes() {
    num_received = 0;
    before_ = std::signal(SIGPIPE, [](int) { ++num_received; });
  }
  ~BrokenPipes() override { std::signal(SIGPIPE, before_); }

  // Returns errno.
  static int write_to_a_closed_pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    ::close(ends[0]);
    const auto written = ::write(ends[1], "x", 1);
    const int number = errno;
    ::close(ends[1]);
    EXPECT_EQ(written, -1);
    return number;
  }

 private:
  void (*before_)(int);
};

TEST_F(BrokenPipes, AreAnErrorAndNoSignal) {
  {
    const WithoutBrokenPipes outer;
    const WithoutBrokenPipes inner;
    EXPECT_EQ(write_to_a_closed_pipe(), EPIPE);
  }
  EXPECT_EQ(num_received, 0);
  EXPECT_EQ(write_to_a_closed_pipe(), EPIPE);  // and afterwards all is as before
  EXPECT_EQ(num_received, 1);
}

TEST_F(BrokenPipes, OfTheProgramStayPending) {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  EXPECT_EQ(write_to_a_closed_pipe(), EPIPE);
  { const WithoutBrokenPipes without_broken_pipes; }
  EXPECT_EQ(num_received, 0);
  pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
  EXPECT_EQ(num_received, 1);
}

}  // namespace
}  // namespace switchyard::without_signals_test
