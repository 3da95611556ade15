// SPDX-License-Identifier: Apache-2.0
// Shapes, tensors, devices, products and placements.
#include <array>
#include <limits>

#include "misuse/misuse.h"
#include "switchyard/captured_graph.h"
#include "switchyard/device.h"
#include "switchyard/matmul.h"
#include "switchyard/placement.h"
#include "switchyard/sequence.h"

namespace switchyard::misuse {
namespace {

constexpr auto kMost = std::numeric_limits<std::int64_t>::max();

void multiply(const ConstTensorView& a, const ConstTensorView& b, const TensorView& c) {
  matmul({}, Matmul{.a = a, .b = b, .c = c});
}

}  // namespace

std::vector<Misuse> of_tensors() {
  return {
      {"Shape::Shape(initializer_list<int64>)", Kind::empty,
       [] { (void)Shape(std::initializer_list<std::int64_t>{}); }, "1 to 4 extents, not 0"},
      {"Shape::Shape(initializer_list<int64>)", Kind::huge,
       [] {
         Shape{kHuge, kHuge};
       },
       "too many elements"},
      {"Shape::Shape(initializer_list<int64>)", Kind::out_of_range,
       [] {
         Shape{2, -1};
       },
       "is negative"},
      {"Shape::Shape(span<int64>)", Kind::shape,
       [] {
         (void)Shape(std::array<std::int64_t, 5>{1, 1, 1, 1, 1});
       },
       "1 to 4 extents, not 5"},
      {"Shape::refuse_extent(int)", Kind::out_of_range,
       [] {
         (void)Shape{2, 3}[2];
       },
       "no extent 2 in shape [2,3]"},
      {"Shape::refuse_extent(int)", Kind::out_of_range,
       [] {
         (void)Shape{2, 3}[-1];
       },
       "no extent -1"},
      {"Shape::with_rows(int64)", Kind::out_of_range,
       [] {
         (void)Shape{2, 3}.with_rows(-4);
       },
       "is negative"},
      {"Shape::with_rows(int64)", Kind::huge,
       [] {
         (void)Shape{2, 3}.with_rows(kMost);
       },
       "too many elements"},

      {"Tensor::Tensor(Shape, Dtype)", Kind::huge,
       [] {
         Tensor({kHuge, 1 << 16}, Dtype::f32);
       },
       "cannot allocate"},
      {"Tensor::Tensor(Shape, Dtype)", Kind::dtype, [] { Tensor({2}, static_cast<Dtype>(77)); },
       "no dtype 77"},
      {"Tensor::zeros(Shape, Dtype)", Kind::huge,
       [] {
         (void)Tensor::zeros({kHuge, 1 << 16}, Dtype::f32);
       },
       "cannot allocate"},
      {"Tensor::from_bytes(Shape, Dtype, span<byte>)", Kind::shape,
       [] { (void)Tensor::from<float>({3}, {1.0F}); }, "1 values were given for a tensor [3]"},
      {"Tensor::of(TensorView)", Kind::shape,
       [] {
         Tensor tensor = floats({2, 4});
         (void)Tensor::of({tensor.data(), Dtype::f32, {2, 2}, 4, tensor.view().owner()});
       },
       "has rows apart"},
      {"Tensor::of(TensorView)", Kind::empty, [] { (void)Tensor::of({}); }, "has none"},
      {"Tensor::clone", Kind::device,
       [] {
         Tensor tensor = floats({2});
         (void)Tensor::of(on_a_gpu(tensor)).clone();
       },
       "in GPU memory"},
      {"detail::require_host(Memory, Shape)", Kind::device,
       [] {
         Tensor tensor = floats({2});
         (void)on_a_gpu(tensor).span<float>();
       },
       "in GPU memory"},
      {"detail::require_span(Dtype, Dtype, bool, Shape)", Kind::dtype,
       [] { (void)floats({2}).span<std::int64_t>(); }, "of f32 was read as i64"},
      {"detail::require_span(Dtype, Dtype, bool, Shape)", Kind::moved_from,
       [] {
         Tensor tensor = ints({2});
         const Tensor taken = std::move(tensor);
         (void)tensor.span<std::int32_t>();  // NOLINT(bugprone-use-after-move)
       },
       "a tensor [0] of f32"},
      {"detail::require_slice(int64, int64, Shape)", Kind::out_of_range,
       [] { (void)floats({2}).view().slice(1, 3); }, "rows 1 to 3 are not a slice of [2]"},
      {"detail::refuse_row(int64, Shape)", Kind::out_of_range,
       [] { (void)floats({2}).view().row(3); }, "no row 3 in [2]"},
      {"detail::refuse_row(int64, Shape)", Kind::moved_from,
       [] {
         Tensor tensor = floats({2});
         const Tensor taken = std::move(tensor);
         (void)tensor.view().row(1);  // NOLINT(bugprone-use-after-move)
       },
       "no row 1 in [0]"},
      {"detail::require_view(void*, Dtype, Shape, int64)", Kind::null,
       [] {
         (void)at_a_null_pointer({2, 2});
       },
       "[2,2] of f32 is a null pointer"},
      {"detail::require_view(void*, Dtype, Shape, int64)", Kind::misaligned,
       [] {
         Tensor tensor = floats({4});
         (void)TensorView(tensor.data() + 1, Dtype::f32, {2}, 1);
       },
       "not aligned to its elements of 4 bytes"},
      {"detail::require_view(void*, Dtype, Shape, int64)", Kind::huge,
       [] {
         Tensor tensor = floats({4});
         (void)TensorView(tensor.data(), Dtype::f32, {4, 1}, kMost / 4);
       },
       "too large to address"},
      {"detail::require_view(void*, Dtype, Shape, int64)", Kind::out_of_range,
       [] {
         Tensor tensor = floats({4});
         (void)TensorView(tensor.data(), Dtype::f32, {2, 2}, 1);
       },
       "row stride 1 is less than a row"},

      {"Device::Device(shared_ptr<DeviceBackend>)", Kind::null,
       [] { Device(std::shared_ptr<const DeviceBackend>()); }, "null pointer"},
      {"Device::cpu(CpuOptions)", Kind::out_of_range, [] { (void)Device::cpu({.num_threads = 0}); },
       "num_threads (0) must be 1 to"},
      {"Device::cpu(CpuOptions)", Kind::huge,
       [] { (void)Device::cpu({.num_threads = 2'000'000'000}); }, "must be 1 to"},
      {"Device::cpu(CpuOptions)", Kind::out_of_range,
       [] {
         (void)Device::cpu({.num_threads = 2, .cores = {0, 1'000'000}});
       },
       "core 1000000"},
      {"Device::cuda(CudaOptions)", Kind::out_of_range, [] { (void)Device::cuda({.ordinal = -1}); },
       "GPU -1"},
      {"Device::copy(ConstTensorView, TensorView)", Kind::shape,
       [] { Device().copy(floats({2}), floats({3})); }, "does not fit into f32 [3]"},
      {"Device::copy(ConstTensorView, TensorView)", Kind::dtype,
       [] { Device().copy(floats({2}), ints({2})); }, "does not fit into i32 [2]"},
      {"Device::copy(ConstTensorView, TensorView)", Kind::device,
       [] {
         Tensor tensor = floats({2});
         Device().copy(floats({2}), on_a_gpu(tensor));
       },
       "the CPU's device cannot copy"},
      {"Device::copy(ConstTensorView, TensorView)", Kind::overlapping,
       [] {
         Tensor tensor = floats({4});
         Device().copy(tensor.view().slice(0, 3), tensor.view().slice(1, 4));
       },
       "must not overlap in memory"},
      {"Device::copy_of(ConstTensorView)", Kind::device,
       [] {
         Tensor tensor = floats({2});
         (void)Device().copy_of(on_a_gpu(tensor));
       },
       "the CPU's device cannot copy"},
      {"Device::to_host(ConstTensorView)", Kind::device,
       [] {
         Tensor tensor = floats({2});
         (void)Device().to_host(on_a_gpu(tensor));
       },
       "the CPU's device cannot copy"},
      {"Device::empty(Shape, Dtype)", Kind::huge,
       [] {
         (void)Device().empty({kHuge, 1 << 16}, Dtype::f32);
       },
       "cannot allocate"},
      {"Device::set_zero(TensorView)", Kind::device,
       [] {
         Tensor tensor = floats({2});
         Device().set_zero(on_a_gpu(tensor));
       },
       "cannot be set to zero"},
      {"Device::set_zero(TensorView)", Kind::null,
       [] { Device().set_zero(at_a_null_pointer({2})); }, "null pointer"},
      {"Device::parallel_for(int64, function)", Kind::out_of_range,
       [] { Device().parallel_for(-1, [](auto, auto) {}); }, "count (-1)"},
      {"Device::parallel_for(int64, function)", Kind::null,
       [] { Device().parallel_for(1, nullptr); }, "is empty: pass a function"},
      {"CapturedGraph::CapturedGraph(Device, function)", Kind::device,
       [] { CapturedGraph(Device(), [] {}); }, "captured on a GPU"},

      {"matmul(Device, Matmul)", Kind::overlapping,
       [] {
         Tensor a = floats({3, 3});
         multiply(a, floats({3, 3}), a);
       },
       "a and c must not overlap"},
      {"matmul(Device, Matmul)", Kind::overlapping,
       [] {
         Tensor rows = floats({3, 6});
         const TensorView left(rows.data(), Dtype::f32, {3, 3}, 6);
         multiply(floats({3, 3}), left, TensorView(rows.data() + 8, Dtype::f32, {3, 3}, 6));
       },
       "b and c must not overlap"},
      {"matmul(Device, Matmul)", Kind::shape,
       [] {
         multiply(floats({2, 3}), floats({2, 2}), floats({2, 2}));
       },
       "3 columns"},
      {"matmul(Device, Matmul)", Kind::dtype,
       [] {
         multiply(ints({2, 2}), floats({2, 2}), floats({2, 2}));
       },
       "a is i32"},
      {"matmul(Device, Matmul)", Kind::empty, [] { matmul({}, Matmul{}); }, "must be a matrix"},
      {"matmul(Device, Matmul)", Kind::device,
       [] {
         Tensor a = floats({2, 2});
         multiply(on_a_gpu(a), floats({2, 2}), floats({2, 2}));
       },
       "a [2,2] is in gpu memory"},
      {"matmul(Device, span<Matmul>)", Kind::overlapping,
       [] {
         Tensor c = floats({2, 2});
         const std::array<Matmul, 2> both{
             Matmul{.a = floats({2, 2}), .b = floats({2, 2}), .c = floats({2, 2})},
             Matmul{.a = floats({2, 2}), .b = c, .c = c}};
         matmul({}, both);
       },
       "product 1 of 2: b and c"},

      {"ExpertPlacement::contiguous(int, int)", Kind::out_of_range,
       [] { (void)ExpertPlacement::contiguous(0, 1); }, "num_experts (0)"},
      {"ExpertPlacement::contiguous(int, int)", Kind::out_of_range,
       [] { (void)ExpertPlacement::contiguous(4, -2); }, "num_ranks (-2)"},
      {"ExpertPlacement::from_owners(vector<int>, int)", Kind::empty,
       [] { (void)ExpertPlacement::from_owners({}, 2); }, "num_experts (0)"},
      {"ExpertPlacement::from_owners(vector<int>, int)", Kind::out_of_range,
       [] {
         (void)ExpertPlacement::from_owners({0, 7}, 2);
       },
       "the owner of expert 1 is 7"},
      {"ExpertPlacement::from_lists(int, vector<vector<int>>)", Kind::out_of_range,
       [] {
         (void)ExpertPlacement::from_lists(2, {{0, 5}});
       },
       "rank 0 lists expert 5"},
      {"ExpertPlacement::from_lists(int, vector<vector<int>>)", Kind::empty,
       [] { (void)ExpertPlacement::from_lists(2, {}); }, "num_ranks (0)"},
      {"ExpertPlacement::refuse_expert(int)", Kind::out_of_range,
       [] { (void)ExpertPlacement::contiguous(4, 2).owner(99); }, "expert 99 is not one of the 4"},
      {"ExpertPlacement::refuse_expert(int)", Kind::out_of_range,
       [] { (void)ExpertPlacement::contiguous(4, 2).owner(-1); }, "expert -1"},
      {"ExpertPlacement::refuse_rank(int)", Kind::out_of_range,
       [] { (void)ExpertPlacement::contiguous(4, 2).experts_of(2); }, "rank 2 is not one of"},
      {"ExpertPlacement::refuse_rank(int)", Kind::moved_from,
       [] {
         auto placement = ExpertPlacement::contiguous(4, 2);
         const auto taken = std::move(placement);
         (void)placement.experts_of(0);  // NOLINT(bugprone-use-after-move)
       },
       "rank 0 is not one of the placement's 0"},

      {"SequenceShard::SequenceShard(int64, int64, int, int)", Kind::huge,
       [] { SequenceShard(kHuge, kHuge, 1, 0); }, "too many tokens to count"},
      {"SequenceShard::SequenceShard(int64, int64, int, int)", Kind::out_of_range,
       [] { SequenceShard(1, -1, 1, 0); }, "length (-1)"},
      {"SequenceShard::SequenceShard(int64, int64, int, int)", Kind::out_of_range,
       [] { SequenceShard(1, 1, 2, 2); }, "sp_rank (2)"},
      {"SequenceShard::offset_of(int)", Kind::out_of_range,
       [] { (void)SequenceShard(1, 8, 2, 0).offset_of(2); }, "sp_rank (2)"},
      {"SequenceShard::count_of(int)", Kind::out_of_range,
       [] { (void)SequenceShard(1, 8, 2, 0).count_of(-1); }, "sp_rank (-1)"},
  };
}

}  // namespace switchyard::misuse
