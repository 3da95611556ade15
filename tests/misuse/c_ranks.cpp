// SPDX-License-Identifier: Apache-2.0
// The C interface's other parts: ranks, layers, checkpoints, and experts over a framework's ranks.
#include <array>
#include <thread>

#include "misuse/misuse.h"
#include "misuse/told.h"
#include "switchyard/c/parallel.h"

namespace switchyard::misuse {
namespace {

constexpr std::array<std::int32_t, 2> kOwners{0, 0};
constexpr switchyard_placement kPlacement{
    .owners = kOwners.data(), .num_experts = 2, .num_ranks = 1};
constexpr std::array<std::int32_t, 2> kOwnersOfTwo{0, 1};
constexpr switchyard_placement kTwoRanks{
    .owners = kOwnersOfTwo.data(), .num_experts = 2, .num_ranks = 2};

// One rank with a layer over it.
struct Ranks {
  switchyard_device* device = nullptr;
  switchyard_comm* comm = nullptr;
  switchyard_layer* layer = nullptr;
  std::array<float, 64> memory{};
  switchyard_tensor tensor{memory.data(), switchyard_f32, 1, {2, 0, 0, 0}};
  switchyard_layer_form form{};
  switchyard_layer_weights weights{};
  switchyard_layer_input input{};
  const char* text = nullptr;

  Ranks() {
    form.experts = {.hidden = 4,
                    .intermediate = 3,
                    .dtype = switchyard_f32,
                    .activation = 0,
                    .clamp_limit = 7,
                    .gate_alpha = 1,
                    .up_offset = 0};
    form.alignment = 1;
    switchyard_router_preset("mixtral", 2, 1, &form.router);
    told(switchyard_device_cpu(1, &device));
    told(switchyard_comm_threads(1, 1000, &comm));
    told(switchyard_layer_make(comm, nullptr, &kPlacement, &form, device, &layer));
  }
  ~Ranks() {
    switchyard_layer_free(layer);
    switchyard_comm_free(comm);
    switchyard_device_free(device);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
};

std::function<void()> ranks(const std::function<int(Ranks&)>& call) {
  return [call] {
    Ranks one;
    told(call(one));
  };
}

// The dispatcher of rank 0 of two, whose other rank only makes its own.
struct Dispatching {
  switchyard_device* device = nullptr;
  std::array<switchyard_comm*, 2> comms{};
  std::array<switchyard_dispatcher*, 2> dispatchers{};
  std::array<std::int32_t, 3> ids{};
  switchyard_shared_form form{.num_tokens = 3, .top_k = 1, .num_rows = 0, .num_received = 0};
  switchyard_shared_moved moved{
      .form = form, .plan = nullptr, .dtype = switchyard_f32, .hidden = 4};

  Dispatching() {
    told(switchyard_device_cpu(1, &device));
    told(switchyard_comm_threads(2, 10000, comms.data()));
    std::thread other([&] { make(1); });
    make(0);
    other.join();
  }
  void make(std::size_t rank) {
    told(switchyard_dispatcher_make(comms[rank], &kTwoRanks, 1, 0, device, &dispatchers[rank]));
  }
};

std::function<void()> dispatching(const std::function<int(Dispatching&)>& call) {
  return [call] {
    Dispatching one;
    told(call(one));
  };
}

int no_bytes(void* /*context*/, const void* /*send*/, void* /*recv*/, std::int64_t /*bytes*/) {
  return switchyard_ok;
}

}  // namespace

std::vector<Misuse> of_c_ranks() {
  return {
      {"switchyard_comm_threads", Kind::null,
       [] { told(switchyard_comm_threads(2, 1000, nullptr)); }, "comms is a null pointer"},
      {"switchyard_comm_threads", Kind::huge,
       ranks([](auto& one) { return switchyard_comm_threads(kHuge, 1000, &one.comm); }),
       "num_ranks (1099511627776)"},
      {"switchyard_comm_connect", Kind::null,
       ranks([](auto& one) { return switchyard_comm_connect(nullptr, 1000, &one.comm); }),
       "is unknown"},
      {"switchyard_comm_connect", Kind::null,
       [] { told(switchyard_comm_connect("threads", 1000, nullptr)); }, "comm is a null pointer"},
      {"switchyard_comm_split", Kind::null,
       ranks([](auto& one) { return switchyard_comm_split(one.comm, 0, 0, nullptr); }),
       "group is a null pointer"},
      {"switchyard_comm_split", Kind::huge, ranks([](auto& one) {
         switchyard_comm* group = nullptr;
         return switchyard_comm_split(one.comm, kHuge, 0, &group);
       }),
       "color (1099511627776)"},
      {"switchyard_comm_rank", Kind::null, [] { told_number(switchyard_comm_rank(nullptr)); },
       "comm is a null pointer"},
      {"switchyard_comm_size", Kind::null, [] { told_number(switchyard_comm_size(nullptr)); },
       "comm is a null pointer"},
      {"switchyard_comm_first_failed", Kind::null,
       [] { told_number(switchyard_comm_first_failed(nullptr)); }, "comm is a null pointer"},
      {"switchyard_comm_abort", Kind::null, [] { told(switchyard_comm_abort(nullptr, "why")); },
       "comm is a null pointer"},
      {"switchyard_comm_barrier", Kind::null, [] { told(switchyard_comm_barrier(nullptr)); },
       "comm is a null pointer"},
      {"switchyard_comm_all_reduce", Kind::null,
       ranks([](auto& one) { return switchyard_comm_all_reduce(one.comm, nullptr, 0); }),
       "values is a null pointer"},
      {"switchyard_comm_all_reduce", Kind::out_of_range,
       ranks([](auto& one) { return switchyard_comm_all_reduce(one.comm, &one.tensor, 3); }),
       "no reduction 3"},
      {"switchyard_comm_all_gather", Kind::shape, ranks([](auto& one) {
         one.tensor.num_extents = 9;
         return switchyard_comm_all_gather(one.comm, &one.tensor, &one.tensor);
       }),
       "9 extents"},
      {"switchyard_comm_reduce_scatter", Kind::dtype, ranks([](auto& one) {
         one.tensor.dtype = -1;
         return switchyard_comm_reduce_scatter(one.comm, &one.tensor, &one.tensor, 0);
       }),
       "dtype -1"},
      {"switchyard_comm_broadcast", Kind::out_of_range,
       ranks([](auto& one) { return switchyard_comm_broadcast(one.comm, &one.tensor, 1); }),
       "root (1)"},
      {"switchyard_comm_all_to_all", Kind::null, ranks([](auto& one) {
         return switchyard_comm_all_to_all(one.comm, &one.tensor, nullptr, &one.tensor, nullptr);
       }),
       "send_rows is a null pointer"},
      {"switchyard_reshard", Kind::null, ranks([](auto& one) {
         return switchyard_reshard(one.comm, one.device, nullptr, nullptr, &kPlacement, 0, nullptr,
                                   nullptr);
       }),
       "from is a null pointer"},
      {"switchyard_reshard", Kind::out_of_range, ranks([](auto& one) {
         return switchyard_reshard(one.comm, one.device, nullptr, &kPlacement, &kPlacement, -1,
                                   nullptr, nullptr);
       }),
       "num_tensors (-1)"},

      {"switchyard_layer_make", Kind::null, ranks([](auto& one) {
         return switchyard_layer_make(one.comm, nullptr, &kPlacement, &one.form, nullptr,
                                      &one.layer);
       }),
       "device is a null pointer"},
      {"switchyard_layer_make", Kind::out_of_range, ranks([](auto& one) {
         one.form.keep = 17;
         return switchyard_layer_make(one.comm, nullptr, &kPlacement, &one.form, one.device,
                                      &one.layer);
       }),
       "no keep 17"},
      {"switchyard_layer_forward", Kind::null, ranks([](auto& one) {
         return switchyard_layer_forward(one.layer, nullptr, nullptr, &one.input, &one.tensor,
                                         nullptr);
       }),
       "weights is a null pointer"},
      {"switchyard_layer_forward", Kind::empty, ranks([](auto& one) {
         return switchyard_layer_forward(one.layer, nullptr, &one.weights, &one.input, &one.tensor,
                                         nullptr);
       }),
       "x has 0 extents"},
      {"switchyard_layer_backward", Kind::null, ranks([](auto& one) {
         return switchyard_layer_backward(one.layer, nullptr, &one.weights, nullptr, nullptr);
       }),
       "saved is a null pointer"},
      {"switchyard_saved_bytes", Kind::null, [] { told_number(switchyard_saved_bytes(nullptr)); },
       "saved is a null pointer"},
      {"switchyard_saved_routing", Kind::null,
       [] { told(switchyard_saved_routing(nullptr, nullptr, nullptr, nullptr)); },
       "saved is a null pointer"},
      {"switchyard_saved_losses", Kind::null,
       [] { told(switchyard_saved_losses(nullptr, nullptr, nullptr)); }, "saved is a null pointer"},
      {"switchyard_run_step", Kind::null, ranks([](auto& one) {
         std::int64_t again = 0;
         return switchyard_run_step(&one.layer, 1, nullptr, nullptr, &again);
       }),
       "step is a null pointer"},
      {"switchyard_layer_stats", Kind::null,
       ranks([](auto& one) { return switchyard_layer_stats(one.layer, nullptr); }),
       "json is a null pointer"},
      {"switchyard_layer_plan_status", Kind::null,
       ranks([](auto& one) { return switchyard_layer_plan_status(nullptr, &one.text); }),
       "layer is a null pointer"},
      {"switchyard_layer_check", Kind::null, [] { told(switchyard_layer_check(nullptr)); },
       "layer is a null pointer"},
      {"switchyard_layer_row_capacity", Kind::null,
       [] { told_number(switchyard_layer_row_capacity(nullptr)); }, "layer is a null pointer"},
      {"switchyard_layer_pick_counts", Kind::null, ranks([](auto& one) {
         return switchyard_layer_pick_counts(one.layer, 0, nullptr, nullptr);
       }),
       "picks is a null pointer"},

      {"switchyard_checkpoint_open", Kind::null,
       [] { told(switchyard_checkpoint_open("/no/such/file", nullptr)); },
       "checkpoint is a null pointer"},
      {"switchyard_checkpoint_contents", Kind::null,
       ranks([](auto& one) { return switchyard_checkpoint_contents(nullptr, &one.text); }),
       "checkpoint is a null pointer"},
      {"switchyard_checkpoint_read", Kind::null,
       [] { told(switchyard_checkpoint_read(nullptr, "w", nullptr, 1)); },
       "checkpoint is a null pointer"},
      {"switchyard_checkpoint_load_tensor", Kind::null, ranks([](auto& one) {
         return switchyard_checkpoint_load_tensor(nullptr, one.device, nullptr, "w", &one.tensor);
       }),
       "checkpoint is a null pointer"},
      {"switchyard_checkpoint_load_block", Kind::null, ranks([](auto& one) {
         return switchyard_checkpoint_load_block(nullptr, one.device, nullptr, "mlp.", nullptr, 0,
                                                 &one.weights);
       }),
       "placement is a null pointer"},
      {"switchyard_checkpoint_save", Kind::null, ranks([](auto& one) {
         return switchyard_checkpoint_save(one.comm, one.device, nullptr, "/tmp/x", nullptr);
       }),
       "form is a null pointer"},
      {"switchyard_checkpoint_save", Kind::out_of_range, ranks([](auto& one) {
         switchyard_checkpoint_contents_form form{};
         form.num_tensors = -1;
         return switchyard_checkpoint_save(one.comm, one.device, nullptr, "/tmp/x", &form);
       }),
       "cannot be -1 tensors"},

      {"switchyard_comm_foreign", Kind::null, ranks([](auto& one) {
         return switchyard_comm_foreign(0, 1, 1000, nullptr, nullptr, &one.comm);
       }),
       "functions is a null pointer"},
      {"switchyard_comm_foreign", Kind::null, ranks([](auto& one) {
         const switchyard_comm_functions some{.all_to_all = {},
                                              .all_gather = &no_bytes,
                                              .broadcast = {},
                                              .barrier = {},
                                              .give_up = {}};
         return switchyard_comm_foreign(0, 1, 1000, &some, nullptr, &one.comm);
       }),
       "function of the communicator is a null pointer"},
      {"switchyard_comm_foreign", Kind::huge, ranks([](auto& one) {
         const switchyard_comm_functions none{};
         return switchyard_comm_foreign(kHuge, 2, 1000, &none, nullptr, &one.comm);
       }),
       "rank (1099511627776)"},
      {"switchyard_dispatcher_make", Kind::null, ranks([](auto& one) {
         return switchyard_dispatcher_make(one.comm, &kPlacement, 1, 0, one.device, nullptr);
       }),
       "dispatcher is a null pointer"},
      {"switchyard_dispatcher_host_syncs", Kind::null,
       [] { told_number(switchyard_dispatcher_host_syncs(nullptr)); },
       "dispatcher is a null pointer"},
      {"switchyard_shared_plan_words", Kind::null,
       [] { told_number(switchyard_shared_plan_words(nullptr, 0, 1, 1)); },
       "placement is a null pointer"},
      {"switchyard_shared_plan_words", Kind::huge,
       [] { told_number(switchyard_shared_plan_words(&kTwoRanks, 0, kHuge, kHuge)); },
       "more than 2^31 picks"},
      {"switchyard_shared_plan_find_tables", Kind::null,
       [] { told(switchyard_shared_plan_find_tables(&kTwoRanks, 0, nullptr)); },
       "tables is a null pointer"},
      {"switchyard_shared_plan_make", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_plan_make(one.dispatchers[0], nullptr, nullptr, one.ids.data(),
                                            switchyard_i32, nullptr);
       }),
       "form is a null pointer"},
      {"switchyard_shared_plan_make", Kind::dtype, dispatching([](auto& one) {
         return switchyard_shared_plan_make(one.dispatchers[0], nullptr, &one.form, one.ids.data(),
                                            77, one.ids.data());
       }),
       "no dtype 77"},
      {"switchyard_shared_plan_sizes", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_plan_sizes(one.dispatchers[0], nullptr, nullptr, nullptr);
       }),
       "form is a null pointer"},
      {"switchyard_shared_plan_check", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_plan_check(one.dispatchers[0], nullptr, &one.form, nullptr);
       }),
       "the plan is a null pointer"},
      {"switchyard_shared_dispatch", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_dispatch(one.dispatchers[0], nullptr, &one.moved, nullptr,
                                           nullptr);
       }),
       "the plan is a null pointer"},
      {"switchyard_shared_dispatch", Kind::huge, dispatching([](auto& one) {
         one.moved.form.num_tokens = kHuge;
         one.moved.form.top_k = kHuge;
         return switchyard_shared_dispatch(one.dispatchers[0], nullptr, &one.moved, nullptr,
                                           nullptr);
       }),
       "more than 2^31 picks"},
      {"switchyard_shared_combine", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_combine(one.dispatchers[0], nullptr, nullptr, nullptr, nullptr,
                                          nullptr);
       }),
       "moved is a null pointer"},
      {"switchyard_shared_combine_backward", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_combine_backward(one.dispatchers[0], nullptr, nullptr, nullptr,
                                                   nullptr, nullptr, nullptr, nullptr);
       }),
       "moved is a null pointer"},
      {"switchyard_shared_moe_forward", Kind::null, dispatching([](auto& one) {
         return switchyard_shared_moe_forward(one.dispatchers[0], nullptr, nullptr, nullptr);
       }),
       "moe is a null pointer"},
      {"switchyard_shared_moe_backward", Kind::null,
       [] { told(switchyard_shared_moe_backward(nullptr, nullptr, nullptr, nullptr)); },
       "dispatcher is a null pointer"},
  };
}

}  // namespace switchyard::misuse
