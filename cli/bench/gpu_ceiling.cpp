// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_ceiling.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "bench/random_rows.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw DeviceError(fmt::format("CUDA failed at {}: {}", what, cudaGetErrorString(status)));
}

using Memory = std::unique_ptr<void, void (*)(void*)>;
Memory take(std::size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "taking memory for a ceiling");
  return {data, [](void* old) { cudaFree(old); }};
}

// Returns the seconds of each of `rounds` consecutive rounds.
std::vector<double> time_rounds(cudaStream_t stream, int rounds,
                                const std::function<void()>& work) {
  std::vector<cudaEvent_t> events(static_cast<std::size_t>(rounds) + 1);
  for (auto& event : events) check(cudaEventCreate(&event), "making an event");
  check(cudaEventRecord(events[0], stream), "recording an event");
  for (std::size_t i = 1; i < events.size(); ++i) {
    work();
    check(cudaEventRecord(events[i], stream), "recording an event");
  }
  check(cudaEventSynchronize(events.back()), "waiting for events");
  std::vector<double> seconds;
  for (std::size_t i = 1; i < events.size(); ++i) {
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, events[i - 1], events[i]), "reading an event");
    seconds.push_back(milliseconds * 1e-3);
  }
  for (auto& event : events) cudaEventDestroy(event);
  return seconds;
}

constexpr int kRounds = 11;

double cool_seconds(cudaStream_t stream, const std::function<void()>& work) {
  const double estimate = time_rounds(stream, 2, work)[1];
  const int warm_ups = static_cast<int>(std::ceil(Heat::kWarmUp / estimate));
  const int rounds = std::clamp(static_cast<int>(Heat::kBurst / estimate) - warm_ups, 1, kRounds);
  std::vector<double> seconds;
  for (int burst = 0; burst < Heat::kBursts; ++burst) {
    std::this_thread::sleep_for(Heat::kPause);
    for (int i = 0; i < warm_ups; ++i) work();
    const auto of_burst = time_rounds(stream, rounds, work);
    seconds.insert(seconds.end(), of_burst.begin(), of_burst.end());
  }
  return median(std::move(seconds));
}

// Keeps the GPU busy from the load until the end of the rounds.
double hot_seconds(cudaStream_t stream, const std::function<void()>& work, double estimate) {
  const int load = static_cast<int>(std::ceil(Heat::kLoad / estimate));
  for (int i = 0; i < load; ++i) work();
  return median(time_rounds(stream, kRounds, work));
}

// The few cuBLAS functions that are needed, loaded at run time so that cuBLAS stays optional.
struct Cublas {
  using Create = int (*)(void**);
  using SetStream = int (*)(void*, cudaStream_t);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);
  void* handle = nullptr;
  Gemm gemm = nullptr;
  std::string reason;
};

Cublas load_cublas(cudaStream_t stream) {
  Cublas blas;
  void* library = nullptr;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW);
  }
  if (library == nullptr) {
    blas.reason = "libcublas was not found";
    return blas;
  }
  const auto create = reinterpret_cast<Cublas::Create>(dlsym(library, "cublasCreate_v2"));
  blas.gemm = reinterpret_cast<Cublas::Gemm>(dlsym(library, "cublasGemmEx"));
  const auto set = reinterpret_cast<Cublas::SetStream>(dlsym(library, "cublasSetStream_v2"));
  if (create == nullptr || set == nullptr || blas.gemm == nullptr || create(&blas.handle) != 0 ||
      set(blas.handle, stream) != 0) {
    blas.reason = "libcublas could not be used";
  }
  return blas;
}

}  // namespace

CoolAndHot time_on_gpu(void* stream, const std::function<void()>& work) {
  const auto on = static_cast<cudaStream_t>(stream);
  const double cool = cool_seconds(on, work);
  return {cool, hot_seconds(on, work, cool)};
}

CoolAndHot copy_ceiling(void* stream, int ordinal, const Timer& timer) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  check(cudaSetDevice(ordinal), "choosing the GPU of a ceiling");
  const auto from = take(kBytes);
  const auto to = take(kBytes);
  check(cudaMemset(from.get(), 0x5b, kBytes), "filling memory");
  const auto copy = [&] {
    check(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream)),
          "copying");
  };
  return 2.0 * kBytes / timer(copy);
}

CoolAndHot gemm_ceiling(void* stream, const DenseProduct& p, std::string& reason) {
  const Cublas blas = load_cublas(static_cast<cudaStream_t>(stream));
  reason = blas.reason;
  if (!reason.empty()) return {};
  const auto bytes = [&](std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns * size_of(p.dtype));
  };
  const auto filled = [&](std::int64_t rows, std::int64_t columns) {
    auto memory = take(bytes(rows, columns));
    const Tensor values = random_rows({std::min<std::int64_t>(rows, 512), columns}, p.dtype, 3);
    for (std::int64_t r = 0; r < rows; r += values.rows()) {
      const auto part = bytes(std::min(values.rows(), rows - r), columns);
      check(cudaMemcpy(static_cast<std::byte*>(memory.get()) + bytes(r, columns), values.data(),
                       part, cudaMemcpyHostToDevice),
            "filling memory");
    }
    return memory;
  };
  const auto a = filled(p.m, p.k);
  const auto b = filled(p.n, p.k);
  const auto c = take(bytes(p.m, p.n));
  // CUDA_R_16BF or CUDA_R_32F; CUBLAS_COMPUTE_32F, which does not use TF32 for f32 products.
  const int type = p.dtype == Dtype::bf16 ? 14 : 0;
  constexpr int kCompute32F = 68;
  const float one = 1.0F;
  const float zero = 0.0F;
  const auto multiply = [&] {
    const int status = blas.gemm(blas.handle, 1, 0, static_cast<int>(p.n), static_cast<int>(p.m),
                                 static_cast<int>(p.k), &one, b.get(), type, static_cast<int>(p.k),
                                 a.get(), type, static_cast<int>(p.k), &zero, c.get(), type,
                                 static_cast<int>(p.n), kCompute32F, -1);
    if (status != 0) throw DeviceError(fmt::format("cublasGemmEx failed with {}", status));
  };
  return 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) /
         time_on_gpu(stream, multiply);
}

}  // namespace switchyard::cli
