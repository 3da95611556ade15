/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface, part 2: ranks, layers over them, and checkpoints.
 *
 * Structs and errors follow the conventions of switchyard.h. Calls on one communicator, and on the
 * layers made over it, are serialised. Collective calls must be made by every rank, each on its own
 * thread, and in the same order. Handles may be freed by any thread and, except for buffers, in any
 * order; freeing null is a no-op. */
#ifndef SWITCHYARD_C_LAYERS_H_
#define SWITCHYARD_C_LAYERS_H_

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A contiguous tensor, in the memory of the call's device, or in host memory if the call takes no
 * device. */
typedef struct {
  void* data;
  int64_t dtype;
  int64_t num_extents; /* 1 to 4; 0: no tensor */
  int64_t extents[4];
} switchyard_tensor;

/* A dtype for checkpoints only: nothing computes in it. */
enum { switchyard_f16 = 4 };

/* Stores a message as this thread's last error and returns `kind`. For callbacks that fail. */
SWITCHYARD_C_API int switchyard_fail(int kind, const char* message);

/* Memory. */

/* Memory of a device. */
typedef struct switchyard_buffer switchyard_buffer;

/* Allocates memory of a device, for work on `stream`. Free the buffer before its device. */
SWITCHYARD_C_API int switchyard_buffer_make(switchyard_device* device, void* stream, int64_t bytes,
                                            switchyard_buffer** buffer, void** data);
SWITCHYARD_C_API void switchyard_buffer_free(switchyard_buffer* buffer);
/* Copy between host memory and device memory, and wait. `bytes` must be even. */
SWITCHYARD_C_API int switchyard_copy_in(switchyard_device* device, void* stream, const void* host,
                                        void* data, int64_t bytes);
SWITCHYARD_C_API int switchyard_copy_out(switchyard_device* device, void* stream, const void* data,
                                         void* host, int64_t bytes);
/* Copies within the device's memory. `bytes` must be even. */
SWITCHYARD_C_API int switchyard_copy_on(switchyard_device* device, void* stream, const void* from,
                                        void* to, int64_t bytes);
/* Waits for all work on the stream. */
SWITCHYARD_C_API int switchyard_synchronize(switchyard_device* device, void* stream);

/* Placements. */

/* The rank that owns each expert. */
typedef struct {
  const int32_t* owners; /* [num_experts]: the owner of each expert */
  int64_t num_experts;
  int64_t num_ranks;
} switchyard_placement;

/* Fills owners [num_experts], placing consecutive experts on consecutive ranks. */
SWITCHYARD_C_API int switchyard_placement_contiguous(int64_t num_experts, int64_t num_ranks,
                                                     int32_t* owners);
SWITCHYARD_C_API int switchyard_placement_check(const switchyard_placement* placement);

/* Ranks. */

/* One rank's handle of a group of ranks. */
typedef struct switchyard_comm switchyard_comm;

/* Makes a group of ranks in this process and fills comms [num_ranks], one handle per rank. */
SWITCHYARD_C_API int switchyard_comm_threads(int64_t num_ranks, int64_t timeout_ms,
                                             switchyard_comm** comms);
/* Joins the group that the environment defines: all processes of the job for "mpi", this process
 * alone for "threads". Waits until all have joined. */
SWITCHYARD_C_API int switchyard_comm_connect(const char* backend, int64_t timeout_ms,
                                             switchyard_comm** comm);
/* Splits the group: ranks with the same color form a new one, ordered by (key, rank). Collective. A
 * negative color joins no group, and `group` becomes null. */
SWITCHYARD_C_API int switchyard_comm_split(switchyard_comm* comm, int64_t color, int64_t key,
                                           switchyard_comm** group);
/* Frees the handle. In a group made by switchyard_comm_threads the rank leaves at once, and calls
 * that wait for it fail; in other groups it leaves once all objects made over it are freed too. */
SWITCHYARD_C_API void switchyard_comm_free(switchyard_comm* comm);
SWITCHYARD_C_API int64_t switchyard_comm_rank(switchyard_comm* comm);
SWITCHYARD_C_API int64_t switchyard_comm_size(switchyard_comm* comm);
/* Returns the rank whose failure came first in a group made by switchyard_comm_threads; -1 if there
 * is none, and for other groups. */
SWITCHYARD_C_API int64_t switchyard_comm_first_failed(switchyard_comm* comm);
/* Tells the other ranks that this one gives up: their calls fail with the reason. In a group made
 * by switchyard_comm_threads any thread may call it, even while the rank waits in a collective. */
SWITCHYARD_C_API int switchyard_comm_abort(switchyard_comm* comm, const char* reason);

/* Collectives on tensors in host memory. `op` is 0 for the sum, 1 for the minimum, 2 for the
 * maximum. */
SWITCHYARD_C_API int switchyard_comm_barrier(switchyard_comm* comm);
SWITCHYARD_C_API int switchyard_comm_all_reduce(switchyard_comm* comm,
                                                const switchyard_tensor* values, int64_t op);
/* Concatenates send [n, ...] of all ranks, in rank order, into recv [size * n, ...]. */
SWITCHYARD_C_API int switchyard_comm_all_gather(switchyard_comm* comm,
                                                const switchyard_tensor* send,
                                                const switchyard_tensor* recv);
/* Reduces send [size * n, ...] and stores this rank's part in recv [n, ...]. */
SWITCHYARD_C_API int switchyard_comm_reduce_scatter(switchyard_comm* comm,
                                                    const switchyard_tensor* send,
                                                    const switchyard_tensor* recv, int64_t op);
SWITCHYARD_C_API int switchyard_comm_broadcast(switchyard_comm* comm,
                                               const switchyard_tensor* values, int64_t root);
/* Sends send_rows[r] rows to rank r and receives recv_rows[r] rows from it; both are [size]. */
SWITCHYARD_C_API int switchyard_comm_all_to_all(switchyard_comm* comm,
                                                const switchyard_tensor* send,
                                                const int64_t* send_rows,
                                                const switchyard_tensor* recv,
                                                const int64_t* recv_rows);

/* The functions below compute on a private device of their communicator, made like the given one.
 * Ranks can therefore pass the same device handle without waiting for each other. */

/* Moves experts from one placement to another: shard[i] [experts of this rank under `from`, ...]
 * becomes into[i] [experts of this rank under `to`, ...]. Collective. */
SWITCHYARD_C_API int switchyard_reshard(switchyard_comm* comm, switchyard_device* device,
                                        void* stream, const switchyard_placement* from,
                                        const switchyard_placement* to, int64_t num_tensors,
                                        const switchyard_tensor* shard,
                                        const switchyard_tensor* into);

/* Fills `form` with the defaults of a model's router: "mixtral", "qwen3_moe", "olmoe",
 * "deepseek_v3", "torchtitan", "kempner_forge_softmax" or "kempner_forge_sigmoid". */
SWITCHYARD_C_API int switchyard_router_preset(const char* name, int64_t num_experts, int64_t top_k,
                                              switchyard_router_form* form);

/* A layer over the ranks of a communicator. */
typedef struct switchyard_layer switchyard_layer;

/* The options of a layer. A field that names an enum of the C++ interface holds the position of one
 * of its values, from 0. */
typedef struct {
  switchyard_experts_form experts;
  switchyard_router_form router;
  int64_t weight_stage;        /* WeightStage */
  int64_t shared_intermediate; /* 0: no shared expert */
  int64_t shared_activation;
  int64_t balance_loss;   /* nonzero: BalanceLoss::batch */
  int64_t share_scores;   /* nonzero: LossScores::shares */
  int64_t z_loss;         /* nonzero: with the z-loss */
  int64_t losses_by_rank; /* nonzero: LossScope::rank */
  double capacity_factor; /* 0: no limit */
  int64_t capacity_rule;  /* CapacityRule */
  int64_t gradient_scale; /* GradientScale */
  int64_t row_capacity;   /* 0: exact sizing */
  int64_t token_capacity; /* 0: as many as rows */
  int64_t drop;           /* nonzero: Overflow::drop */
  int64_t alignment;
  int64_t mover;     /* MoverKind */
  int64_t combine;   /* CombineMode */
  int64_t keep;      /* Keep */
  int64_t sentinels; /* nonzero: ids of E or more mean no pick */
} switchyard_layer_form;

/* The weights of one rank, or their gradients. Tensors marked "or none" may be left out
 * (num_extents 0). */
typedef struct {
  switchyard_tensor gate;           /* [E, H] */
  switchyard_tensor gate_bias;      /* [E], or none */
  switchyard_tensor score_bias;     /* [E] f32, or none */
  switchyard_tensor gate_up;        /* [e, 2I, H], or [e, I, H] without a gate */
  switchyard_tensor down;           /* [e, H, I] */
  switchyard_tensor gate_up_bias;   /* [e, 2I] or [e, I], or none */
  switchyard_tensor down_bias;      /* [e, H], or none */
  switchyard_tensor shared_gate_up; /* [2S, H] or [S, H], or none */
  switchyard_tensor shared_down;    /* [H, S], or none */
} switchyard_layer_weights;

/* Makes a layer. Collective. If `batch` is null, the ranks of `comm` make up the batch. */
SWITCHYARD_C_API int switchyard_layer_make(switchyard_comm* comm, switchyard_comm* batch,
                                           const switchyard_placement* placement,
                                           const switchyard_layer_form* form,
                                           switchyard_device* device, switchyard_layer** layer);
SWITCHYARD_C_API void switchyard_layer_free(switchyard_layer* layer);

/* The state that a training forward leaves for its backward. x must stay unchanged until then. */
typedef struct switchyard_saved switchyard_saved;
SWITCHYARD_C_API void switchyard_saved_free(switchyard_saved* saved);
SWITCHYARD_C_API int64_t switchyard_saved_bytes(switchyard_saved* saved);
/* Copies out the routing before capacity: ids [T, K] i32 and weights [T, K] f32. */
SWITCHYARD_C_API int switchyard_saved_routing(switchyard_saved* saved, void* stream,
                                              const switchyard_tensor* ids,
                                              const switchyard_tensor* weights);
/* Returns the losses of the forward; 0 for those that the layer does not have. Waits. */
SWITCHYARD_C_API int switchyard_saved_losses(switchyard_saved* saved, double* balance, double* z);

/* The input of one forward. */
typedef struct {
  switchyard_tensor x;              /* [T, H] */
  switchyard_tensor expert_ids;     /* [T, K] i32 or i64; none: the router chooses */
  switchyard_tensor expert_weights; /* [T, K] f32, or none; requires expert_ids */
  switchyard_tensor valid;          /* [T] i32, where 0 marks padding; or none */
} switchyard_layer_input;

/* Computes y [T, H]. Collective. `saved` is null for inference. */
SWITCHYARD_C_API int switchyard_layer_forward(switchyard_layer* layer, void* stream,
                                              const switchyard_layer_weights* weights,
                                              const switchyard_layer_input* input,
                                              const switchyard_tensor* y, switchyard_saved** saved);

/* The gradients that backward reads and writes. */
typedef struct {
  switchyard_tensor d_y; /* [T, H] */
  double d_balance_loss;
  double d_z_loss;
  switchyard_tensor d_x;              /* [T, H] */
  switchyard_tensor d_expert_weights; /* [T, K] f32, or none */
  switchyard_layer_weights gradients; /* in the weights' dtypes or f32; score_bias has none */
  int64_t accumulate;                 /* nonzero: gradients are added to the existing values */
} switchyard_layer_gradients;

/* Computes gradients. Collective. Consumes the contents of `saved`, whose handle must still be
 * freed. */
SWITCHYARD_C_API int switchyard_layer_backward(switchyard_layer* layer, void* stream,
                                               const switchyard_layer_weights* weights,
                                               switchyard_saved* saved,
                                               const switchyard_layer_gradients* gradients);

/* A step for switchyard_run_step. Returns switchyard_ok or the kind of error, after reporting it
 * with switchyard_fail unless it came from a call of the library. */
typedef int (*switchyard_step)(void* context);
/* Runs a step over layers, and repeats it with exact sizing if one overflowed. Collective. */
SWITCHYARD_C_API int switchyard_run_step(switchyard_layer* const* layers, int64_t num_layers,
                                         switchyard_step step, void* context, int64_t* ran_again);

/* Return JSON objects, valid until the next of these calls for the layer. They wait. */
SWITCHYARD_C_API int switchyard_layer_stats(switchyard_layer* layer, const char** json);
SWITCHYARD_C_API int switchyard_layer_plan_status(switchyard_layer* layer, const char** json);
/* Fails if the last forward's plan reports bad ids, non-finite logits, or an overflow, unless rows
 * may be dropped. */
SWITCHYARD_C_API int switchyard_layer_check(switchyard_layer* layer);
/* Returns the number of rows that a rank has room for; 0 with exact sizing. */
SWITCHYARD_C_API int64_t switchyard_layer_row_capacity(switchyard_layer* layer);
/* Returns the picks [E] that this rank has counted. If `take` is nonzero, the call is collective
 * over the batch: it returns the sum over all ranks and resets the counts. */
SWITCHYARD_C_API int switchyard_layer_pick_counts(switchyard_layer* layer, int64_t take,
                                                  int64_t* picks, int64_t* num_tokens);

/* Checkpoints. */

/* An open checkpoint. */
typedef struct switchyard_checkpoint switchyard_checkpoint;

/* Opens a safetensors file, an index, or a folder of them. */
SWITCHYARD_C_API int switchyard_checkpoint_open(const char* path,
                                                switchyard_checkpoint** checkpoint);
SWITCHYARD_C_API void switchyard_checkpoint_free(switchyard_checkpoint* checkpoint);
/* Returns a JSON object with "metadata" and "tensors", valid as long as the checkpoint. */
SWITCHYARD_C_API int switchyard_checkpoint_contents(switchyard_checkpoint* checkpoint,
                                                    const char** json);
/* Copies a tensor's bytes, as stored in the file, to host memory. `bytes` must be the tensor's
 * size. */
SWITCHYARD_C_API int switchyard_checkpoint_read(switchyard_checkpoint* checkpoint, const char* name,
                                                void* into, int64_t bytes);
/* Load a whole tensor, or a rank's part of a block, into the device's memory. bf16 and f16 are
 * widened to f32, and f16 is rounded to bf16, if `into` has that dtype. They wait. */
SWITCHYARD_C_API int switchyard_checkpoint_load_tensor(switchyard_checkpoint* checkpoint,
                                                       switchyard_device* device, void* stream,
                                                       const char* name,
                                                       const switchyard_tensor* into);
SWITCHYARD_C_API int switchyard_checkpoint_load_block(
    switchyard_checkpoint* checkpoint, switchyard_device* device, void* stream, const char* prefix,
    const switchyard_placement* placement, int64_t rank, const switchyard_layer_weights* into);

/* A tensor of a checkpoint and its name. */
typedef struct {
  const char* name;
  switchyard_tensor tensor;
} switchyard_named_tensor;

/* One rank's part of an MoE layer in a checkpoint. */
typedef struct {
  const char* prefix; /* "model.layers.3.mlp." */
  switchyard_placement placement;
  int64_t rank; /* this rank's number in the placement */
  switchyard_layer_weights tensors;
} switchyard_checkpoint_block;

/* Everything that one rank saves. */
typedef struct {
  const switchyard_named_tensor* tensors; /* whole on every rank that lists them */
  int64_t num_tensors;
  const switchyard_checkpoint_block* blocks;
  int64_t num_blocks;
  const char* const* metadata; /* key, value, key, value, ... */
  int64_t num_metadata;        /* number of pairs */
  int64_t file_per_rank;       /* nonzero: the path is a folder */
} switchyard_checkpoint_contents_form;

/* Saves a checkpoint of what the ranks hold together. Collective, over ranks that share a file
 * system. */
SWITCHYARD_C_API int switchyard_checkpoint_save(switchyard_comm* comm, switchyard_device* device,
                                                void* stream, const char* path,
                                                const switchyard_checkpoint_contents_form* form);

#ifdef __cplusplus
}
#endif

#endif
