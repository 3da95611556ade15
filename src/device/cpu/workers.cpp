// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/workers.h"

#include <algorithm>

#include "core/signals_wait.h"
#include "device/cpu/gemm/gemm.h"

namespace switchyard::cpu {
namespace {

constexpr std::int64_t kLeastInPiece = 64;

}  // namespace

void Workers::run(std::int64_t count,
                  const std::function<void(std::int64_t task, Scratch& scratch)>& task) {
  // Before 3.12, oneDNN points the stack pointer into its heap during f32 products, and the frame
  // of a signal handler would overwrite data there.
  const SignalsWait no_handlers;
  pool_.run(count, [&](std::int64_t i, int worker) {
    const SingleThreaded single_threaded;
    Scratch& scratch = scratch_[static_cast<std::size_t>(worker)];
    scratch.reset();
    task(i, scratch);
  });
}

std::int64_t Workers::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const Scratch& scratch : scratch_) bytes += scratch.bytes_held();
  return bytes;
}

void Workers::split(std::int64_t count,
                    const std::function<void(std::int64_t first, std::int64_t last)>& piece) {
  const auto pieces = std::clamp<std::int64_t>(count / kLeastInPiece, 1, pool_.num_threads());
  pool_.run(pieces, [&](std::int64_t i, int /*worker*/) {
    piece(count * i / pieces, count * (i + 1) / pieces);
  });
}

}  // namespace switchyard::cpu
