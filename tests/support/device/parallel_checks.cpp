// SPDX-License-Identifier: Apache-2.0
#include "support/device/parallel_checks.h"

#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "support/checkpoint/checkpoints.h"
#include "support/compare.h"
#include "support/layer/layer_alone.h"
#include "support/random.h"
#include "switchyard/checkpoint.h"
#include "switchyard/load_balancer.h"
#include "switchyard/parallelize.h"
#include "switchyard/reshard.h"
#include "switchyard/sequence.h"

namespace switchyard::testing {
namespace {

constexpr std::array kDtypes{Dtype::f32, Dtype::bf16};

std::uint64_t seed_of(const Communicator& comm, int more = 0) {
  return static_cast<std::uint64_t>(100 * comm.rank() + more);
}

// A matrix with gaps between its rows.
struct Columns {
  Columns(const Device& device, const ConstTensorView& values)
      : all(device.empty({values.rows(), values.shape()[1] + 3}, values.dtype())),
        view(all.data(), values.dtype(), values.shape(), all.shape()[1], all.view().owner(),
             all.memory()) {
    device.set_zero(all);
    device.copy(values, view);
  }
  Tensor all;
  TensorView view;
};

template <typename View>
void add_all(std::vector<ConstTensorView>& all, const BasicExpertTensors<View>& expert) {
  for (const auto& [name, view] : named_tensors(expert)) {
    if (view.data() != nullptr) all.push_back(view);
  }
}

std::vector<ConstTensorView> all_of(const MoeWeights& layer) {
  std::vector<ConstTensorView> all;
  for (const auto& view : {layer.router.gate, layer.router.gate_bias, layer.router.score_bias}) {
    if (view.data() != nullptr) all.push_back(view);
  }
  for (const auto& expert : layer.experts) add_all(all, expert);
  add_all(all, layer.shared);
  return all;
}

// Expects `actual` to be in the device's memory.
void expect_same(const Device& device, const MoeWeights& actual, const MoeWeights& expected) {
  const auto a = all_of(actual);
  const auto e = all_of(expected);
  ASSERT_EQ(a.size(), e.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].memory(), device.memory());
    EXPECT_TRUE(same_bits(device.to_host(a[i]), Device().to_host(e[i]))) << "tensor " << i;
  }
}

MoeLayerOptions options_of(Dtype dtype) {
  auto options = small_layer_options();
  options.dtype = dtype;
  options.shared_intermediate = 8;
  return options;
}

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

void expect_sequences_as_on_cpu(Communicator& comm, const Device& device) {
  struct Sizes {
    std::int64_t batch, length, hidden;
  };
  for (const auto& [batch, length, hidden] :
       {Sizes{3, 13, 5}, Sizes{2, 64, 96}, Sizes{1, 3, 8}, Sizes{2, 0, 4}, Sizes{0, 4, 4}}) {
    const SequenceShard shard(batch, length, comm.size(), comm.rank());
    SCOPED_TRACE(length);
    for (const Dtype dtype : kDtypes) {
      const Tensor local = Random(seed_of(comm)).tensor({shard.num_tokens(), hidden}, dtype);
      const Tensor full = gather_sequence(comm, shard, local);
      const Tensor on_device = gather_sequence(comm, shard, device.copy_of(local), device);
      EXPECT_EQ(on_device.memory(), device.memory());
      EXPECT_TRUE(same_bits(device.to_host(on_device), full));
      const Columns apart(device, local);
      EXPECT_TRUE(
          same_bits(device.to_host(gather_sequence(comm, shard, apart.view, device)), full));

      const Tensor d_full = Random(seed_of(comm, 1)).tensor({batch, length, hidden}, dtype);
      const Tensor d_on_device = device.copy_of(d_full);
      EXPECT_TRUE(
          same_bits(device.to_host(gather_sequence_backward_slice(shard, d_on_device, device)),
                    gather_sequence_backward_slice(shard, d_full)));
      EXPECT_TRUE(
          same_bits(device.to_host(gather_sequence_backward_sum(comm, shard, d_on_device, device)),
                    gather_sequence_backward_sum(comm, shard, d_full)));
    }
  }
}

void expect_combine_sequence_as_on_cpu(Communicator& comm, const Device& device) {
  constexpr int kNumExperts = 5;
  constexpr std::int64_t kWidth = 64;
  const SequenceShard shard(2, 13, comm.size(), comm.rank());
  const auto experts = ExpertPlacement::contiguous(kNumExperts, comm.size());
  Random random(seed_of(comm));
  const Tensor ids =
      random.expert_ids({.num_tokens = shard.num_tokens(), .top_k = 2, .num_experts = kNumExperts});
  const Tensor x = random.tensor({shard.num_tokens(), kWidth}, Dtype::f32);
  const auto run = [&](const Device& on) {
    Dispatcher dispatcher(comm, experts, {.plan = {.hidden = kWidth}}, on);
    const Plan plan = dispatcher.plan(on.copy_of(ids));
    const Tensor rows = dispatcher.dispatch(plan, on.copy_of(x));
    return on.to_host(combine_sequence(dispatcher, plan, {.rows = rows}, comm, shard));
  };
  EXPECT_TRUE(same_bits(run(device), run(Device())));
}

void expect_sums_of_gradients_as_on_cpu(Communicator& comm, const Device& device) {
  const int ep = comm.size() % 2 == 0 ? 2 : 1;
  Mesh mesh(comm, {{"dp", comm.size() / ep}, {"ep", ep}});
  const auto experts = ExpertPlacement::contiguous(6, ep);
  for (const Dtype dtype : kDtypes) {
    MoeParameters expected = MoeParameters::random(
        options_of(dtype), experts, mesh.coordinate("ep"), seed_of(comm), Biases::all);
    MoeParameters actual = expected.copy_on(device);
    reduce_gradients(expected.views(), mesh);
    reduce_gradients(actual.views(), mesh, {}, device);
    expect_same(device, actual.weights(), expected.weights());
  }
  const Tensor values = Random(seed_of(comm, 2)).tensor({70, 33}, Dtype::bf16);
  const Columns expected(Device(), values);
  const Columns actual(device, values);
  Tensor numbers = Tensor::from<std::int64_t>({3}, {comm.rank(), 1, std::int64_t{1} << 60});
  Tensor on_device = device.copy_of(numbers);
  reduce_replicated(std::vector<TensorView>{expected.view, {}, numbers}, mesh);
  reduce_replicated(std::vector<TensorView>{actual.view, {}, on_device}, mesh, {}, device);
  EXPECT_TRUE(same_bits(device.to_host(actual.all), expected.all));
  EXPECT_TRUE(same_bits(device.to_host(on_device), numbers));
}

void expect_reshard_as_on_cpu(Communicator& comm, const Device& device) {
  std::vector<std::int32_t> owners;
  for (int e = 0; e < 6; ++e) owners.push_back((5 * e + 1) % comm.size());
  const auto from = ExpertPlacement::contiguous(6, comm.size());
  const auto to = ExpertPlacement::from_owners(owners, comm.size());
  for (const Dtype dtype : kDtypes) {
    const auto weights =
        MoeParameters::random(options_of(dtype), from, comm.rank(), 3, Biases::all);
    const auto expected = reshard(weights, from, to, comm);
    const auto actual = reshard(weights.copy_on(device), from, to, comm);
    expect_same(device, actual.weights(), expected.weights());
    const auto home = reshard(actual, to, from, comm);
    expect_same(device, home.weights(), weights.weights());
  }
  const auto mine = static_cast<std::int64_t>(from.experts_of(comm.rank()).size());
  const Tensor moments = Random(seed_of(comm)).tensor({mine, 3, 5}, Dtype::f32);
  const Tensor on_device = device.copy_of(moments);
  const std::vector<ConstTensorView> shard{moments};
  const std::vector<ConstTensorView> device_shard{on_device};
  for (const auto& target : {to, from}) {
    const auto expected = reshard(shard, from, target, comm);
    const auto actual = reshard(device_shard, from, target, comm, device);
    EXPECT_TRUE(same_bits(device.to_host(actual.front()), expected.front()));
  }
}

void expect_division_as_on_cpu(Communicator& comm, const Device& device) {
  Mesh mesh(comm, {{"ep", comm.size()}});
  const auto whole = ExpertPlacement::contiguous(6, 1);
  const auto weights = MoeParameters::random(options_of(Dtype::bf16), whole, 0, 3, Biases::all);
  const auto apply = [&](MoeParameters parameters) {
    MoeBlock block{.name = "mlp", .parameters = std::move(parameters), .placement = whole};
    MoeBlock* const blocks[] = {&block};
    EXPECT_EQ(apply_expert_parallel(blocks, &mesh), comm.size() > 1 ? 1 : 0);
    return block.parameters;
  };
  expect_same(device, apply(weights.copy_on(device)).weights(), apply(weights).weights());
}

void expect_checkpoints_as_on_cpu(Communicator& comm, const Device& device,
                                  const std::filesystem::path& folder) {
  const auto saved = ExpertPlacement::contiguous(6, comm.size());
  const auto weights =
      MoeParameters::random(options_of(Dtype::bf16), saved, comm.rank(), 3, Biases::all);
  const auto on_device = weights.copy_on(device);
  const Tensor matrix = Random(5).tensor({7, 9}, Dtype::f32);
  const Columns apart(device, matrix);
  const Tensor of_host = Random(6).tensor({4}, Dtype::f32);
  const auto save = [&](const std::string& name, const MoeWeights& tensors,
                        const ConstTensorView& w, const Device& on, CheckpointForm form) {
    save_checkpoint(comm, folder / name,
                    {.tensors = {{"w", w}, {"average", of_host}},
                     .blocks = {{"mlp.", tensors, saved, comm.rank()}},
                     .device = on},
                    form);
  };
  save("host", weights.weights(), matrix, Device(), CheckpointForm::one_file);
  save("device", on_device.weights(), apart.view, device, CheckpointForm::one_file);
  save("ranks", on_device.weights(), apart.view, device, CheckpointForm::file_per_rank);
  comm.barrier();
  EXPECT_EQ(bytes_of(folder / "device"), bytes_of(folder / "host"));

  // Load with another number of ranks, in the saved dtype and in f32.
  const auto loaded = ExpertPlacement::from_lists(6, {{0, 3, 4}, {1, 2, 5}});
  for (const std::string name : {"device", "ranks"}) {
    const auto checkpoint = switchyard::Checkpoint::open(folder / name);
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      MoeParameters expected(options_of(dtype), loaded, comm.rank() % 2, Biases::all);
      MoeParameters actual(options_of(dtype), loaded, comm.rank() % 2, Biases::all, device);
      load_block(checkpoint, "mlp.", loaded, comm.rank() % 2, expected.views());
      load_block(checkpoint, "mlp.", loaded, comm.rank() % 2, actual.views(), device);
      expect_same(device, actual.weights(), expected.weights());
    }
    const Columns read(device, Tensor::zeros({7, 9}, Dtype::f32));
    load_tensor(checkpoint, "w", read.view, device);
    EXPECT_TRUE(same_bits(device.to_host(read.view), matrix));
    Tensor average({4}, Dtype::f32);
    load_tensor(checkpoint, "average", average, device);
    EXPECT_TRUE(same_bits(average, of_host));
  }
}

void expect_conversions_as_on_cpu(const Device& device) {
  const auto on_device = [&](const Checkpoint& checkpoint) {
    NamedTensors tensors;
    for (const auto& [name, view] : checkpoint.tensors()) tensors[name] = device.copy_of(view);
    return tensors;
  };
  for (const Dtype dtype : kDtypes) {
    const Checkpoint packed = gpt_oss(dtype);
    expect_same(device, from_hugging_face(on_device(packed), "mlp.", placement(), 2, device),
                hugging_face(packed, 2));
    Checkpoint forge(dtype);
    forge.add("router.gate.weight", {5, kHidden})
        .add("up_w", {5, kHidden, kInner})
        .add("gate_w", {5, kHidden, kInner})
        .add("down_w", {5, kInner, kHidden});
    expect_same(device, from_kempner_forge(on_device(forge), "mlp.", placement(), 0, device),
                kempner_forge(forge, 0));
  }
}

void expect_balancing_as_on_cpu(const Device& device) {
  for (const BiasRule rule : {BiasRule::sign, BiasRule::moving_average}) {
    LoadBalancer on_cpu(4, {.rule = rule});
    LoadBalancer on_device(4, {.rule = rule});
    Tensor expected = Random(1).tensor({4}, Dtype::f32);
    Tensor actual = device.copy_of(expected);
    for (std::int64_t step = 0; step < 3; ++step) {
      const std::vector<std::int64_t> counts{step, 5, 2, 11};
      on_cpu.update(counts, step, expected);
      on_device.update(counts, step, actual, device);
      EXPECT_TRUE(same_bits(device.to_host(actual), expected));
      EXPECT_TRUE(same_bits(on_device.moving_average(), on_cpu.moving_average()));
    }
  }
}

}  // namespace switchyard::testing
