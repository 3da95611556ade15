// SPDX-License-Identifier: Apache-2.0
#include <barrier>
#include <chrono>
#include <oneapi/dnnl/dnnl.hpp>
#include <thread>
#include <vector>

#include "bench/cpu_ceiling.h"
#include "launch.h"

// From the OpenMP runtime that oneDNN is built with.
extern "C" void omp_set_num_threads(int num_threads);

namespace switchyard::cli {
namespace {

constexpr std::int64_t kSize = 2048;
constexpr double kGigaflop = 2.0 * kSize * kSize * kSize * 1e-9;

// The dtype that products of `dtype` are computed in. Without bf16 units the library uses f32, and
// older CPUs have no bf16 product in oneDNN at all.
Dtype computed_in(Dtype dtype) {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto units = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & units) == units ? dtype : Dtype::f32;
}

// bf16 products are fast if the CPU has units for them, so more of them are timed.
int num_products(Dtype dtype) { return dtype == Dtype::f32 ? 1 : 4; }

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

dnnl::memory::data_type type_of(Dtype dtype) {
  return dtype == Dtype::f32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

Tensor some_matrix(Dtype dtype) {
  Tensor matrix({kSize, kSize}, dtype);
  std::int64_t i = 0;
  const auto value = [&i] { return static_cast<float>(i++ * 37 % 101) / 50.0F - 1.0F; };
  if (dtype == Dtype::f32) {
    for (auto& v : matrix.span<float>()) v = value();
  } else {
    for (auto& v : matrix.span<Bfloat16>()) v = to_bfloat16(value());
  }
  return matrix;
}

// Runs one product at a time, on as many OpenMP threads as the calling thread allows.
class Product {
 public:
  explicit Product(Dtype dtype)
      : dtype_(dtype),
        a_(some_matrix(dtype)),
        b_(some_matrix(dtype)),
        c_(Tensor::zeros({kSize, kSize}, dtype)) {}

  void run() {
    if (dtype_ == Dtype::f32) {
      dnnl_sgemm('N', 'N', kSize, kSize, kSize, 1.0F, a_.span<float>().data(), kSize,
                 b_.span<float>().data(), kSize, 0.0F, c_.span<float>().data(), kSize);
      return;
    }
    static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    constexpr auto kAny = DNNL_RUNTIME_DIM_VAL;
    const dnnl::memory::desc any({kAny, kAny}, type_of(dtype_), {kAny, 1});
    const dnnl::memory::desc desc({kSize, kSize}, type_of(dtype_), {kSize, 1});
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul matmul(dnnl::matmul::primitive_desc(engine, any, any, any));
#else
    const dnnl::matmul matmul(
        dnnl::matmul::primitive_desc(dnnl::matmul::desc(any, any, any), engine));
#endif
    dnnl::stream stream(engine);
    matmul.execute(stream, {{DNNL_ARG_SRC, dnnl::memory(desc, engine, a_.data())},
                            {DNNL_ARG_WEIGHTS, dnnl::memory(desc, engine, b_.data())},
                            {DNNL_ARG_DST, dnnl::memory(desc, engine, c_.data())}});
  }

 private:
  Dtype dtype_;
  Tensor a_, b_, c_;
};

}  // namespace

struct GemmCeiling::Data {
  CeilingOptions options;
  std::vector<Product> products;  // one per thread
};

bool has_gemm_ceiling() { return true; }

GemmCeiling::GemmCeiling(const CeilingOptions& options)
    : data_(std::make_unique<Data>(Data{options, {}})) {
  data_->options.dtype = computed_in(options.dtype);
  for (int i = 0; i < options.threads; ++i) data_->products.emplace_back(data_->options.dtype);
}
GemmCeiling::~GemmCeiling() = default;

double GemmCeiling::independent(Communicator& comm) {
  const auto& options = data_->options;
  const int times = num_products(options.dtype);
  std::barrier all_ready(options.threads + 1);
  std::vector<std::thread> threads;
  for (int i = 0; i < options.threads; ++i) {
    threads.emplace_back([&, i] {
      pin_to_core(options.first_core + i);
      omp_set_num_threads(1);
      all_ready.arrive_and_wait();
      for (int n = 0; n < times; ++n) data_->products[static_cast<std::size_t>(i)].run();
    });
  }
  comm.barrier();
  const auto begin = std::chrono::steady_clock::now();
  all_ready.arrive_and_wait();
  for (auto& thread : threads) thread.join();
  comm.barrier();
  return kGigaflop * times * options.threads * comm.size() / seconds_since(begin);
}

double GemmCeiling::threaded(Communicator& comm) {
  const auto& options = data_->options;
  const int times = num_products(options.dtype);
  Tensor seconds = Tensor::zeros({1}, Dtype::f32);
  comm.barrier();
  if (comm.rank() == 0) {
    // Uses a thread that may run on all cores, because the library's threads inherit its affinity.
    std::thread maker([&] {
      allow_all_cores();
      omp_set_num_threads(options.threads * comm.size());
      Product& product = data_->products.front();
      product.run();  // creates the library's threads
      const auto begin = std::chrono::steady_clock::now();
      for (int n = 0; n < times; ++n) product.run();
      seconds.span<float>()[0] = static_cast<float>(seconds_since(begin));
    });
    maker.join();
  }
  comm.broadcast(seconds, 0);
  return kGigaflop * times / static_cast<double>(seconds.span<float>()[0]);
}

}  // namespace switchyard::cli
