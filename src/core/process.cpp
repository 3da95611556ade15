// SPDX-License-Identifier: Apache-2.0
#include "core/process.h"

#include <pthread.h>

#include <atomic>

namespace switchyard {
namespace {

std::atomic<int> generation{0};

}  // namespace

int fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace switchyard
