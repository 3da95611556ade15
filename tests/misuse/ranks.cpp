// SPDX-License-Identifier: Apache-2.0
// Communicators, groups of threads, agreement and meshes.
#include <array>
#include <thread>

#include "misuse/misuse.h"
#include "switchyard/agreement.h"
#include "switchyard/communicator.h"
#include "switchyard/mesh.h"
#include "switchyard/run_ranks.h"

namespace switchyard::misuse {
namespace {

constexpr auto kNoOp = static_cast<ReduceOp>(9);

std::function<void()> alone(const std::function<void(Communicator&)>& call) {
  return [call] { call(*connect()); };
}

void send(Communicator& comm, const ConstTensorView& send, const TensorView& recv,
          const std::vector<std::int64_t>& rows) {
  comm.all_to_all(send, rows, recv, rows);
}

}  // namespace

std::vector<Misuse> of_ranks() {
  return {
      {"connect(ConnectOptions)", Kind::out_of_range, [] { (void)connect({.backend = "pigeons"}); },
       "\"pigeons\" is unknown"},
      {"connect(ConnectOptions)", Kind::empty, [] { (void)connect({.backend = ""}); },
       "is unknown"},
      {"connect(ConnectOptions)", Kind::out_of_range,
       [] { (void)connect({.timeout = std::chrono::milliseconds(-5)}); }, "timeout (-5 ms)"},
      {"run_ranks(int, function, RankOptions)", Kind::null, [] { run_ranks(2, nullptr); },
       "is empty: pass a function"},
      {"run_ranks(int, function, RankOptions)", Kind::huge,
       [] { run_ranks(2'000'000'000, [](Communicator&) {}); }, "num_ranks (2000000000)"},
      {"run_ranks(int, function, RankOptions)", Kind::out_of_range,
       [] { run_ranks(0, [](Communicator&) {}); }, "num_ranks (0)"},
      {"make_thread_ranks(int, RankOptions)", Kind::huge,
       [] { (void)make_thread_ranks(2'000'000'000); }, "num_ranks (2000000000)"},
      {"make_thread_ranks(int, RankOptions)", Kind::out_of_range,
       [] { (void)make_thread_ranks(-1); }, "num_ranks (-1)"},

      {"Communicator::all_gather(ConstTensorView, TensorView)", Kind::shape,
       alone([](auto& comm) { comm.all_gather(floats({2}), floats({3})); }),
       "recv [3] must hold 1 times"},
      {"Communicator::all_gather(ConstTensorView, TensorView)", Kind::dtype,
       alone([](auto& comm) { comm.all_gather(floats({2}), ints({2})); }),
       "send is f32 but recv is i32"},
      {"Communicator::all_gather(ConstTensorView, TensorView)", Kind::overlapping,
       alone([](auto& comm) {
         Tensor both = floats({2});
         comm.all_gather(both, both);
       }),
       "send and recv must not overlap"},
      {"Communicator::all_gather(ConstTensorView, TensorView)", Kind::device, alone([](auto& comm) {
         Tensor tensor = floats({2});
         comm.all_gather(on_a_gpu(tensor), floats({2}));
       }),
       "in GPU memory"},
      {"Communicator::all_gather(ConstTensorView, TensorView)", Kind::null,
       alone([](auto& comm) { comm.all_gather(at_a_null_pointer({2}), floats({2})); }),
       "null pointer"},
      {"Communicator::all_reduce(TensorView, ReduceOp)", Kind::dtype,
       alone([](auto& comm) { comm.all_reduce(Tensor({2}, Dtype::f16)); }),
       "f16 cannot be reduced"},
      {"Communicator::all_reduce(TensorView, ReduceOp)", Kind::out_of_range,
       alone([](auto& comm) { comm.all_reduce(floats({2}), kNoOp); }), "no reduction 9"},
      {"Communicator::all_reduce(TensorView, ReduceOp)", Kind::device, alone([](auto& comm) {
         Tensor tensor = floats({2});
         comm.all_reduce(on_a_gpu(tensor));
       }),
       "in GPU memory"},
      {"Communicator::all_to_all(ConstTensorView, span<int64>, TensorView, span<int64>)",
       Kind::shape, alone([](auto& comm) {
         send(comm, floats({2}), floats({2}), {1, 1});
       }),
       "send_rows has 2 entries for 1 ranks"},
      {"Communicator::all_to_all(ConstTensorView, span<int64>, TensorView, span<int64>)",
       Kind::huge, alone([](auto& comm) { send(comm, floats({2}), floats({2}), {kHuge}); }),
       "need more rows than the tensor [2] has"},
      {"Communicator::all_to_all(ConstTensorView, span<int64>, TensorView, span<int64>)",
       Kind::overlapping, alone([](auto& comm) {
         Tensor both = floats({2});
         send(comm, both, both, {2});
       }),
       "send and recv must not overlap"},
      {"Communicator::all_to_all(ConstTensorView, span<int64>, TensorView, span<int64>)",
       Kind::empty, alone([](auto& comm) { send(comm, floats({2}), floats({2}), {}); }),
       "send_rows has 0 entries"},
      {"Communicator::reduce_scatter(ConstTensorView, TensorView, ReduceOp)", Kind::shape,
       alone([](auto& comm) { comm.reduce_scatter(floats({2}), floats({3})); }),
       "send [2] must hold 1 times"},
      {"Communicator::reduce_scatter(ConstTensorView, TensorView, ReduceOp)", Kind::overlapping,
       alone([](auto& comm) {
         Tensor both = floats({2});
         comm.reduce_scatter(both, both);
       }),
       "send and recv must not overlap"},
      {"Communicator::reduce_scatter(ConstTensorView, TensorView, ReduceOp)", Kind::out_of_range,
       alone([](auto& comm) { comm.reduce_scatter(floats({2}), floats({2}), kNoOp); }),
       "no reduction 9"},
      {"Communicator::broadcast(TensorView, int)", Kind::out_of_range,
       alone([](auto& comm) { comm.broadcast(floats({2}), 1); }), "root (1) must be a rank of 1"},
      {"Communicator::broadcast(TensorView, int)", Kind::shape, alone([](auto& comm) {
         Tensor tensor = floats({4});
         comm.broadcast(TensorView(tensor.data(), Dtype::f32, {2, 1}, 2), 0);
       }),
       "not contiguous"},
      {"Communicator::run_collective(string_view, string, function)", Kind::moved_from,
       alone([](auto& comm) {
         comm.abort("enough");
         comm.barrier();
       }),
       "enough"},

      {"agree(Communicator, function)", Kind::null, alone([](auto& comm) { agree(comm, nullptr); }),
       "is empty: pass a function"},
      {"agree(Communicator, string_view, function)", Kind::null,
       alone([](auto& comm) { agree(comm, "work", nullptr); }), "work: rank 0: "},
      {"require_equal(Communicator, string_view, int64)", Kind::out_of_range,
       [] { run_ranks(2, [](auto& comm) { require_equal(comm, "sizes", comm.rank()); }); },
       "ranks disagree about sizes: rank 0 has 0, rank 1 has 1"},

      {"Mesh::Mesh(Communicator, vector<MeshAxis>)", Kind::huge, alone([](auto& comm) {
         Mesh(comm, {{"dp", 65536}, {"ep", 65536}});
       }),
       "more ranks than the 1 of the world"},
      {"Mesh::Mesh(Communicator, vector<MeshAxis>)", Kind::out_of_range, alone([](auto& comm) {
         Mesh(comm, {{"dp", 0}});
       }),
       "must be positive"},
      {"Mesh::Mesh(Communicator, vector<MeshAxis>)", Kind::empty, alone([](auto& comm) {
         Mesh(comm, {{"", 1}});
       }),
       "has no name"},
      {"Mesh::comm(vector<string>)", Kind::out_of_range, alone([](auto& comm) {
         Mesh(comm, {{"dp", 1}}).comm({"ep"});
       }),
       "no axis \"ep\""},
      {"Mesh::size(string_view)", Kind::out_of_range, alone([](auto& comm) {
         (void)Mesh(comm, {{"dp", 1}}).size("ep");
       }),
       "no axis \"ep\""},
      {"Mesh::coordinate(string_view)", Kind::empty, alone([](auto& comm) {
         (void)Mesh(comm, {{"dp", 1}}).coordinate("");
       }),
       "no axis \"\""},
  };
}

}  // namespace switchyard::misuse
