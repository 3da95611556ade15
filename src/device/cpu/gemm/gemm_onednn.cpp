// SPDX-License-Identifier: Apache-2.0
// Matrix products by oneDNN. Each product runs on a single thread, so that its bits depend only on
// its sizes and strides.
#include <array>
#include <oneapi/dnnl/dnnl.hpp>

#include "core/require.h"
#include "device/cpu/gemm/gemm_library.h"

// From the OpenMP runtime that oneDNN is built with. The setting is per calling thread.
extern "C" int omp_get_max_threads();
extern "C" void omp_set_num_threads(int num_threads);

namespace switchyard::cpu {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Type = dnnl::memory::data_type;

Type type_of(Dtype dtype) { return dtype == Dtype::f32 ? Type::f32 : Type::bf16; }

Dims strides_of(std::int64_t stride, Layout layout) {
  return layout == Layout::plain ? Dims{stride, 1} : Dims{1, stride};
}

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// A primitive with runtime sizes, so that one serves products of all sizes.
struct AnySizeProduct {
  dnnl::matmul matmul;

  AnySizeProduct(Layout a, Layout b, Dtype c, bool accumulate) {
    const SingleThreaded for_good;  // a primitive keeps its initial thread count
    constexpr auto kAny = DNNL_RUNTIME_DIM_VAL;
    const Desc a_desc({kAny, kAny}, Type::bf16, strides_of(kAny, a));
    const Desc b_desc({kAny, kAny}, Type::bf16, strides_of(kAny, b));
    const Desc c_desc({kAny, kAny}, type_of(c), strides_of(kAny, Layout::plain));
    dnnl::primitive_attr attributes;
    if (accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc desc(cpu_engine(), a_desc, b_desc, c_desc, attributes);
#else
    const dnnl::matmul::primitive_desc desc(dnnl::matmul::desc(a_desc, b_desc, c_desc), attributes,
                                            cpu_engine());
#endif
    matmul = dnnl::matmul(desc);
  }
};

// Returns the primitive for these layouts and dtypes. The first call creates all of them.
const dnnl::matmul& product_for(const Gemm& args) {
  constexpr auto kPlain = Layout::plain;
  constexpr auto kTurned = Layout::transposed;
  static const std::array<AnySizeProduct, 16> products{{
      {kPlain, kPlain, Dtype::f32, false},
      {kPlain, kPlain, Dtype::f32, true},
      {kPlain, kPlain, Dtype::bf16, false},
      {kPlain, kPlain, Dtype::bf16, true},
      {kPlain, kTurned, Dtype::f32, false},
      {kPlain, kTurned, Dtype::f32, true},
      {kPlain, kTurned, Dtype::bf16, false},
      {kPlain, kTurned, Dtype::bf16, true},
      {kTurned, kPlain, Dtype::f32, false},
      {kTurned, kPlain, Dtype::f32, true},
      {kTurned, kPlain, Dtype::bf16, false},
      {kTurned, kPlain, Dtype::bf16, true},
      {kTurned, kTurned, Dtype::f32, false},
      {kTurned, kTurned, Dtype::f32, true},
      {kTurned, kTurned, Dtype::bf16, false},
      {kTurned, kTurned, Dtype::bf16, true},
  }};
  const std::size_t index = (args.a.layout == kTurned ? 8U : 0U) +
                            (args.b.layout == kTurned ? 4U : 0U) +
                            (args.c.dtype == Dtype::bf16 ? 2U : 0U) + (args.accumulate ? 1U : 0U);
  return products[index].matmul;
}

}  // namespace

void gemm_f32(const Gemm& args) {
  const auto status = dnnl_sgemm(
      args.a.layout == Layout::plain ? 'N' : 'T', args.b.layout == Layout::plain ? 'N' : 'T',
      args.m, args.n, args.k, 1.0F, reinterpret_cast<const float*>(args.a.data), args.a.stride,
      reinterpret_cast<const float*>(args.b.data), args.b.stride, args.accumulate ? 1.0F : 0.0F,
      reinterpret_cast<float*>(args.c.data), args.c.stride);
  check_invariant(status == dnnl_success, "dnnl_sgemm of {} x {} x {} gave status {}", args.m,
                  args.n, args.k, static_cast<int>(status));
}

namespace {

std::string name_of(dnnl::cpu_isa isa) {
  switch (isa) {
    case dnnl::cpu_isa::sse41:
      return "sse41";
    case dnnl::cpu_isa::avx:
      return "avx";
    case dnnl::cpu_isa::avx2:
      return "avx2";
    case dnnl::cpu_isa::avx512_core:
      return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16:
      return "avx512_core_bf16";
    default:
      return fmt::format("instruction set {:#x}", static_cast<unsigned>(isa));
  }
}

}  // namespace

bool has_bf16_units() {
  static const bool has = [] {
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    const auto bf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & bf16) == bf16;
  }();
  return has;
}

void gemm_bf16(const Gemm& args) {
  const auto memory_of = [](const Dims& dims, Type type, const Dims& strides, const void* data) {
    return dnnl::memory(Desc(dims, type, strides), cpu_engine(), const_cast<void*>(data));
  };
  try {
    dnnl::stream stream(cpu_engine());
    product_for(args).execute(
        stream,
        {{DNNL_ARG_SRC, memory_of({args.m, args.k}, Type::bf16,
                                  strides_of(args.a.stride, args.a.layout), args.a.data)},
         {DNNL_ARG_WEIGHTS, memory_of({args.k, args.n}, Type::bf16,
                                      strides_of(args.b.stride, args.b.layout), args.b.data)},
         {DNNL_ARG_DST, memory_of({args.m, args.n}, type_of(args.c.dtype),
                                  strides_of(args.c.stride, Layout::plain), args.c.data)}});
  } catch (const dnnl::error& error) {
    throw InternalError(fmt::format("oneDNN's matmul of {} x {} x {} in bf16: {}", args.m, args.n,
                                    args.k, error.message));
  }
}

int max_gemm_threads() { return omp_get_max_threads(); }
void set_gemm_threads(int num_threads) { omp_set_num_threads(num_threads); }

const char* gemm_library() {
  return has_bf16_units() ? "oneDNN, bf16 by the CPU's own units" : "oneDNN, bf16 computed in f32";
}

std::string gemm_numerics() {
  const dnnl_version_t* const v = dnnl_version();
  return fmt::format("oneDNN {}.{}.{} for {}", v->major, v->minor, v->patch,
                     name_of(dnnl::get_effective_cpu_isa()));
}

}  // namespace switchyard::cpu
