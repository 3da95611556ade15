// SPDX-License-Identifier: Apache-2.0
// Checkpoints of f16: what becomes of every value of it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/checkpoint/checkpoint_files.h"
#include "support/compare.h"
#include "support/device/pretend_gpu.h"
#include "support/errors.h"
#include "switchyard/checkpoint.h"
#include "switchyard/communicator.h"
#include "switchyard/error.h"
#include "switchyard/moe_layer.h"

namespace switchyard::testing::float16_test {
namespace {

constexpr std::size_t kValues = 0x10000;

// As the standard says it: sign, 5 bits of exponent, 10 of mantissa.
double value_of(std::uint16_t bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 0x3ffU;
  if (exponent == 31 && mantissa != 0.0) return std::numeric_limits<double>::quiet_NaN();
  if (exponent == 31) return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024.0 + mantissa, exponent - 25);
}

// The nearer of the two bf16 around a value that is finite, or the even one.
std::uint16_t nearest_bf16(double value) {
  const auto below =
      static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
  const auto above = static_cast<std::uint16_t>(below + 1);  // further from 0
  const double to_below = std::abs(value - to_float(Bfloat16{below}));
  const double to_above = std::abs(value - to_float(Bfloat16{above}));
  if (to_below == to_above) return below % 2 == 0 ? below : above;
  return to_below < to_above ? below : above;
}

// All that there are, in order of their bits.
std::string every_value() {
  std::string data;
  for (std::size_t i = 0; i < kValues; ++i) {
    data += bytes_of<std::uint16_t>({static_cast<std::uint16_t>(i)});
  }
  return data;
}

class Float16Test : public CheckpointFiles {
 protected:
  switchyard::Checkpoint file_with(const FileTensors& tensors) const {
    return switchyard::Checkpoint::open(put("x.safetensors", file_of(tensors)));
  }
  switchyard::Checkpoint every_value_in_a_file() const {
    return file_with({{"w", {"F16", {256, 256}, every_value()}}});
  }
};

TEST_F(Float16Test, BecomesF32Exactly) {
  Tensor loaded({256, 256}, Dtype::f32);
  load_tensor(every_value_in_a_file(), "w", loaded);
  for (std::size_t i = 0; i < kValues; ++i) {
    const double expected = value_of(static_cast<std::uint16_t>(i));
    const float actual = loaded.span<float>()[i];
    ASSERT_EQ(std::signbit(actual), i >= 0x8000) << i;
    ASSERT_TRUE(std::isnan(expected) ? std::isnan(actual) : actual == expected)
        << i << " became " << actual << " instead of " << expected;
  }
}

TEST_F(Float16Test, BecomesTheNearestBf16) {
  Tensor loaded({256, 256}, Dtype::bf16);
  load_tensor(every_value_in_a_file(), "w", loaded);
  const auto actual = loaded.span<Bfloat16>();
  for (std::size_t i = 0; i < kValues; ++i) {
    const double value = value_of(static_cast<std::uint16_t>(i));
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(to_float(actual[i]))) << i;
    } else if (std::isinf(value)) {
      ASSERT_EQ(to_float(actual[i]), value) << i;
    } else {
      ASSERT_EQ(actual[i].bits, nearest_bf16(value)) << i;
    }
  }
  EXPECT_EQ(actual[0x3c04].bits, 0x3f80);  // 1 + 2⁻⁸: halfway, and down to the even one
  EXPECT_EQ(actual[0x3c0c].bits, 0x3f82);  // 1 + 3 · 2⁻⁸: up to it
  EXPECT_EQ(actual[0x3c05].bits, 0x3f81);  // a little more than halfway
  EXPECT_EQ(actual[0x8001].bits, 0xb380);  // the smallest below 0: −2⁻²⁴
  EXPECT_EQ(actual[0x7bff].bits, 0x4780);  // 65504, the largest: up to 2¹⁶
  EXPECT_TRUE(std::isnan(to_float(actual[0x7c01])));
}

TEST_F(Float16Test, BecomesNothingElse) {
  const auto file = file_with({{"half", {"F16", {2}, bytes_of<std::uint16_t>({0x3c00, 0xc000})}},
                               {"whole", zeros("F32", {2}, 4)}});
  Tensor same({2}, Dtype::f16);
  load_tensor(file, "half", same);
  EXPECT_EQ(same.span<Float16>()[1].bits, 0xc000);
  const auto error = [&](const std::string& name, Dtype dtype) {
    Tensor into({2}, dtype);
    return replace_all(error_of<InvalidArgument>([&] { load_tensor(file, name, into); }),
                       file.path().string(), "FILE");
  };
  EXPECT_EQ(error("half", Dtype::i32),
            "half of FILE is f16 [2], which cannot be loaded into i32 [2]");
  EXPECT_EQ(error("whole", Dtype::f16),
            "whole of FILE is f32 [2], which cannot be loaded into f16 [2]");
}

// `count` values from 1 on, no two of them alike in bf16.
FileTensor ones(const std::vector<std::int64_t>& shape, std::uint16_t& next) {
  FileTensor tensor{"F16", shape, ""};
  std::int64_t count = 1;
  for (const auto extent : shape) count *= extent;
  for (std::int64_t i = 0; i < count; ++i, next += 8) tensor.data += bytes_of({next});
  return tensor;
}

// Two experts of hidden size 3 and intermediate size 2, as Hugging Face packs them or as gpt-oss.
FileTensors packed_block() {
  std::uint16_t next = 0x3c00;
  return {{"m.gate.weight", ones({2, 3}, next)},
          {"m.gate.e_score_correction_bias", ones({2}, next)},
          {"m.experts.gate_up_proj", ones({2, 4, 3}, next)},
          {"m.experts.down_proj", ones({2, 3, 2}, next)}};
}
FileTensors gpt_oss_block() {
  std::uint16_t next = 0x3c00;
  return {{"m.router.weight", ones({2, 3}, next)},
          {"m.router.bias", ones({2}, next)},
          {"m.experts.gate_up_proj", ones({2, 3, 4}, next)},
          {"m.experts.gate_up_proj_bias", ones({2, 4}, next)},
          {"m.experts.down_proj", ones({2, 2, 3}, next)},
          {"m.experts.down_proj_bias", ones({2, 3}, next)}};
}

// The block with every tensor as f32.
FileTensors widened(FileTensors tensors) {
  for (auto& [name, tensor] : tensors) {
    std::string wide;
    for (std::size_t i = 0; i < tensor.data.size(); i += 2) {
      Float16 value;
      std::memcpy(&value, tensor.data.data() + i, 2);
      wide += bytes_of({to_float(value)});
    }
    tensor.data = wide;
    tensor.dtype = "F32";
  }
  return tensors;
}

std::vector<ConstTensorView> tensors_of(const MoeWeights& weights) {
  std::vector<ConstTensorView> all{weights.router.gate, weights.router.gate_bias,
                                   weights.router.score_bias};
  for (const auto& e : weights.experts) {
    for (const auto& view : {e.gate, e.up, e.down, e.gate_bias, e.up_bias, e.down_bias}) {
      all.push_back(view);
    }
  }
  return all;
}

TEST_F(Float16Test, BlocksConvertAsF32Does) {
  const auto placement = ExpertPlacement::contiguous(2, 2);
  for (const auto& block : {packed_block(), gpt_oss_block()}) {
    const auto half = file_with(block);
    const auto wide = file_with(widened(block));
    const auto actual = tensors_of(from_hugging_face(half.tensors(), "m.", placement, 1));
    const auto expected = tensors_of(from_hugging_face(wide.tensors(), "m.", placement, 1));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(actual[i], expected[i])) << i;
    }
  }
}

TEST_F(Float16Test, BlocksAreLoadedIntoEitherDtype) {
  const auto placement = ExpertPlacement::contiguous(2, 2);
  const auto half = file_with(packed_block());
  const auto expected = from_hugging_face(half.tensors(), "m.", placement, 1);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    MoeLayerOptions options{
        .hidden = 3, .intermediate = 2, .router = RouterOptions::torchtitan(2, 1), .dtype = dtype};
    MoeParameters into(options, placement, 1);
    load_block(half, "m.", placement, 1, into.views());
    EXPECT_TRUE(same_bits(into.weights().router.score_bias, expected.router.score_bias));
    const auto loaded = tensors_of(into.weights());
    const auto wanted = tensors_of(expected);
    for (std::size_t t = 0; t < wanted.size(); ++t) {
      for (std::int64_t r = 0; r < wanted[t].rows() && wanted[t].data() != nullptr; ++r) {
        const auto row = loaded[t].slice(r, r + 1);
        const auto values = wanted[t].slice(r, r + 1).span<float>();
        for (std::size_t i = 0; i < values.size(); ++i) {
          const float actual =
              row.dtype() == Dtype::f32 ? row.span<float>()[i] : to_float(row.span<Bfloat16>()[i]);
          ASSERT_EQ(actual, values[i]);
        }
      }
    }
  }
}

TEST_F(Float16Test, IsConvertedForAGpu) {
  const auto gpu = PretendGpu::device(PretendGpu::Peers::apart);
  const auto half = file_with(packed_block());
  Tensor expected({2, 3, 2}, Dtype::bf16);
  load_tensor(half, "m.experts.down_proj", expected);
  Tensor there = gpu.empty({2, 3, 2}, Dtype::bf16);
  load_tensor(half, "m.experts.down_proj", there, gpu);
  EXPECT_TRUE(same_bits(gpu.to_host(there), expected));

  const auto one = ExpertPlacement::contiguous(2, 1);
  NamedTensors on_gpu;
  for (const auto& [name, view] : half.tensors()) on_gpu[name] = gpu.copy_of(view).view();
  const auto weights = from_hugging_face(on_gpu, "m.", one, 0, gpu);
  const auto on_host = from_hugging_face(half.tensors(), "m.", one, 0);
  EXPECT_TRUE(same_bits(gpu.to_host(weights.experts[1].up), on_host.experts[1].up));
  EXPECT_EQ(error_of<InvalidArgument>([&] { from_hugging_face(on_gpu, "m.", one, 0); }),
            "a tensor of f16 [2,3] is in gpu memory, but the device works in host memory; pass the "
            "GPU's device as well");
}

TEST_F(Float16Test, IsNotReduced) {
  const auto world = connect();
  Tensor values = Tensor::zeros({2}, Dtype::f16);
  EXPECT_EQ(error_of<Unsupported>([&] { world->all_reduce(values); }),
            "f16 cannot be reduced: convert it to f32 or bf16 first");
}

}  // namespace
}  // namespace switchyard::testing::float16_test
