// SPDX-License-Identifier: Apache-2.0
// Signals that arrive while a CPU computes.
#include <gtest/gtest.h>
#include <sys/time.h>

#include <csignal>
#include <string>

#include "support/child.h"
#include "support/compare.h"
#include "support/random.h"
#include "switchyard/device.h"
#include "switchyard/matmul.h"

namespace switchyard::signals_test {
namespace {

volatile std::sig_atomic_t handled = 0;
void count_signal(int /*number*/) { handled = handled + 1; }

void send_every(int microseconds) {
  const itimerval timer{{0, microseconds}, {0, microseconds}};
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

// Products are as ever, and so is the heap, which some library takes for its stack.
std::string products_under_signals(const Device& device) {
  testing::Random random(1);
  const Tensor a = random.tensor({256, 128}, Dtype::f32);
  const Tensor b = random.tensor({128, 256}, Dtype::f32);
  Tensor expected({256, 256}, Dtype::f32);
  matmul(device, Matmul{.a = a, .b = b, .c = expected});
  std::signal(SIGALRM, count_signal);
  send_every(50);
  bool is_same = true;
  for (int i = 0; i < 200 || handled < 200; ++i) {
    Tensor c({256, 256}, Dtype::f32);
    matmul(device, Matmul{.a = a, .b = b, .c = c});
    is_same = is_same && testing::same_bits(c, expected);
  }
  send_every(0);
  return is_same ? "the same" : "other bits";
}

TEST(Signals, DisturbNoProduct) {
  for (const int threads : {1, 2}) {
    EXPECT_EQ(testing::in_child(
                  [&] { return products_under_signals(Device::cpu({.num_threads = threads})); }),
              "the same")
        << threads << " threads";
  }
}

}  // namespace
}  // namespace switchyard::signals_test
