/* The C interface, second part: ranks, layers over them, and checkpoints.
 *
 * Structs and errors are as in switchyard.h. Calls on one communicator, and on the layers made over
 * it, wait for each other. Collective calls are made by every rank, each on a thread of its own,
 * and in the same order. Handles are freed in any order and by any thread; freeing null does
 * nothing. */
#ifndef SWITCHYARD_C_LAYERS_H_
#define SWITCHYARD_C_LAYERS_H_

#include "switchyard/c/switchyard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Contiguous; in the memory of the call's device, or of the host where there is none. */
typedef struct {
  void* data;
  int64_t dtype;
  int64_t num_extents; /* 1 to 4; 0: no tensor */
  int64_t extents[4];
} switchyard_tensor;

/* Checkpoints may hold it: nothing computes in it. */
enum { switchyard_f16 = 4 };

/* Keeps a message as this thread's last error and gives `kind` back: for callbacks that fail. */
SWITCHYARD_C_API int switchyard_fail(int kind, const char* message);

/* Memory. */

typedef struct switchyard_buffer switchyard_buffer;

/* Memory of a device, for work on `stream`. It is freed before its device. */
SWITCHYARD_C_API int switchyard_buffer_make(switchyard_device* device, void* stream, int64_t bytes,
                                            switchyard_buffer** buffer, void** data);
SWITCHYARD_C_API void switchyard_buffer_free(switchyard_buffer* buffer);
/* Between the host's memory and the device's. Waits. */
SWITCHYARD_C_API int switchyard_copy_in(switchyard_device* device, void* stream, const void* host,
                                        void* data, int64_t bytes);
SWITCHYARD_C_API int switchyard_copy_out(switchyard_device* device, void* stream, const void* data,
                                         void* host, int64_t bytes);
/* Within the device's memory. */
SWITCHYARD_C_API int switchyard_copy_on(switchyard_device* device, void* stream, const void* from,
                                        void* to, int64_t bytes);
/* Waits for all work on the stream. */
SWITCHYARD_C_API int switchyard_synchronize(switchyard_device* device, void* stream);

/* Placements. */

typedef struct {
  const int32_t* owners; /* [num_experts]: the rank of every expert */
  int64_t num_experts;
  int64_t num_ranks;
} switchyard_placement;

/* Consecutive experts on consecutive ranks; fills owners [num_experts]. */
SWITCHYARD_C_API int switchyard_placement_contiguous(int64_t num_experts, int64_t num_ranks,
                                                     int32_t* owners);
SWITCHYARD_C_API int switchyard_placement_check(const switchyard_placement* placement);

/* Ranks. */

typedef struct switchyard_comm switchyard_comm;

/* A group of ranks in this process: fills comms [num_ranks], one for each rank. */
SWITCHYARD_C_API int switchyard_comm_threads(int64_t num_ranks, int64_t timeout_ms,
                                             switchyard_comm** comms);
/* Joins the group that the environment defines: all processes of the job for "mpi", this process
 * alone for "threads". Waits for all of them. */
SWITCHYARD_C_API int switchyard_comm_connect(const char* backend, int64_t timeout_ms,
                                             switchyard_comm** comm);
/* Ranks with the same color form a group, in the order of (key, rank). A negative color joins none,
 * and `group` is null. Collective. */
SWITCHYARD_C_API int switchyard_comm_split(switchyard_comm* comm, int64_t color, int64_t key,
                                           switchyard_comm** group);
/* This rank takes part no more: those that wait for it are told. Layers keep what they need. */
SWITCHYARD_C_API void switchyard_comm_free(switchyard_comm* comm);
SWITCHYARD_C_API int64_t switchyard_comm_rank(switchyard_comm* comm);
SWITCHYARD_C_API int64_t switchyard_comm_size(switchyard_comm* comm);
/* The rank of a group of threads whose failure came first; -1: none, or not known. */
SWITCHYARD_C_API int64_t switchyard_comm_first_failed(switchyard_comm* comm);
/* This rank gives up: the calls of the others fail with the reason. In a group of threads any
 * thread may call it, also while the rank waits in a collective. */
SWITCHYARD_C_API int switchyard_comm_abort(switchyard_comm* comm, const char* reason);

/* Collectives, of tensors in the host's memory. `op` is 0 for sums, 1 for minima, 2 for maxima. */
SWITCHYARD_C_API int switchyard_comm_barrier(switchyard_comm* comm);
SWITCHYARD_C_API int switchyard_comm_all_reduce(switchyard_comm* comm,
                                                const switchyard_tensor* values, int64_t op);
/* send [n, ...] becomes recv [size * n, ...], by rank. */
SWITCHYARD_C_API int switchyard_comm_all_gather(switchyard_comm* comm,
                                                const switchyard_tensor* send,
                                                const switchyard_tensor* recv);
/* send [size * n, ...] becomes recv [n, ...]: this rank's part of the reduction. */
SWITCHYARD_C_API int switchyard_comm_reduce_scatter(switchyard_comm* comm,
                                                    const switchyard_tensor* send,
                                                    const switchyard_tensor* recv, int64_t op);
SWITCHYARD_C_API int switchyard_comm_broadcast(switchyard_comm* comm,
                                               const switchyard_tensor* values, int64_t root);
/* send_rows and recv_rows [size]: rows for, and from, every rank. */
SWITCHYARD_C_API int switchyard_comm_all_to_all(switchyard_comm* comm,
                                                const switchyard_tensor* send,
                                                const int64_t* send_rows,
                                                const switchyard_tensor* recv,
                                                const int64_t* recv_rows);

/* Layers compute on a device of their communicator's own, like the one given: so ranks may name one
 * device, and none waits for another's turn. */

/* Collective. Tensors shard[i] [experts of this rank under `from`, ...] become into[i] [experts
 * under `to`, ...]. */
SWITCHYARD_C_API int switchyard_reshard(switchyard_comm* comm, switchyard_device* device,
                                        void* stream, const switchyard_placement* from,
                                        const switchyard_placement* to, int64_t num_tensors,
                                        const switchyard_tensor* shard,
                                        const switchyard_tensor* into);

/* Fills a form as a model's router has it: "mixtral", "qwen3_moe", "olmoe", "deepseek_v3",
 * "torchtitan", "kempner_forge_softmax" or "kempner_forge_sigmoid". */
SWITCHYARD_C_API int switchyard_router_preset(const char* name, int64_t num_experts, int64_t top_k,
                                              switchyard_router_form* form);

typedef struct switchyard_layer switchyard_layer;

typedef struct {
  switchyard_experts_form experts;
  switchyard_router_form router;
  int64_t weight_stage;        /* this and others as in the order of the C++ type: WeightStage */
  int64_t shared_intermediate; /* 0: no shared expert */
  int64_t shared_activation;
  int64_t balance_loss;   /* other than 0: over all tokens at once */
  int64_t share_scores;   /* other than 0: LossScores::shares */
  int64_t z_loss;         /* other than 0: there is one */
  int64_t losses_by_rank; /* other than 0: LossScope::rank */
  double capacity_factor; /* 0: no limit */
  int64_t capacity_rule;  /* CapacityRule */
  int64_t gradient_scale; /* GradientScale */
  int64_t row_capacity;   /* 0: exact sizing */
  int64_t token_capacity; /* 0: as many as rows */
  int64_t drop;           /* other than 0: what finds no room is dropped */
  int64_t alignment;
  int64_t mover;     /* MoverKind */
  int64_t combine;   /* CombineMode */
  int64_t keep;      /* Keep */
  int64_t sentinels; /* other than 0: ids of E and more are no pick */
} switchyard_layer_form;

/* Weights of one rank, or gradients of them. */
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

/* Collective. `batch` may be null: the ranks of `comm` make up the batch. */
SWITCHYARD_C_API int switchyard_layer_make(switchyard_comm* comm, switchyard_comm* batch,
                                           const switchyard_placement* placement,
                                           const switchyard_layer_form* form,
                                           switchyard_device* device, switchyard_layer** layer);
SWITCHYARD_C_API void switchyard_layer_free(switchyard_layer* layer);

/* A training forward leaves it for its backward; x stays as it is until then. */
typedef struct switchyard_saved switchyard_saved;
SWITCHYARD_C_API void switchyard_saved_free(switchyard_saved* saved);
SWITCHYARD_C_API int64_t switchyard_saved_bytes(switchyard_saved* saved);
/* ids [T, K] i32 and weights [T, K] f32, as they were before capacity. */
SWITCHYARD_C_API int switchyard_saved_routing(switchyard_saved* saved, void* stream,
                                              const switchyard_tensor* ids,
                                              const switchyard_tensor* weights);
/* Waits. */
SWITCHYARD_C_API int switchyard_saved_losses(switchyard_saved* saved, double* balance, double* z);

typedef struct {
  switchyard_tensor x;              /* [T, H] */
  switchyard_tensor expert_ids;     /* [T, K] i32 or i64, or none: the router chooses */
  switchyard_tensor expert_weights; /* [T, K] f32, or none; only with expert_ids */
  switchyard_tensor valid;          /* [T] i32, or none: 0 marks padding */
} switchyard_layer_input;

/* Collective. `saved` may be null, for inference. */
SWITCHYARD_C_API int switchyard_layer_forward(switchyard_layer* layer, void* stream,
                                              const switchyard_layer_weights* weights,
                                              const switchyard_layer_input* input,
                                              const switchyard_tensor* y, switchyard_saved** saved);

typedef struct {
  switchyard_tensor d_y; /* [T, H] */
  double d_balance_loss;
  double d_z_loss;
  switchyard_tensor d_x;              /* [T, H] */
  switchyard_tensor d_expert_weights; /* [T, K] f32, or none */
  switchyard_layer_weights gradients; /* of the weights' dtypes or f32; none of score_bias */
  int64_t accumulate;                 /* other than 0: gradients are added to what is there */
} switchyard_layer_gradients;

/* Collective. Uses `saved` up. */
SWITCHYARD_C_API int switchyard_layer_backward(switchyard_layer* layer, void* stream,
                                               const switchyard_layer_weights* weights,
                                               switchyard_saved* saved,
                                               const switchyard_layer_gradients* gradients);

/* Returns switchyard_ok or what went wrong, which it has told switchyard_fail where no call of the
 * library did. */
typedef int (*switchyard_step)(void* context);
/* Collective. Runs a step over layers, again with exact sizing if one of them overflowed. */
SWITCHYARD_C_API int switchyard_run_step(switchyard_layer* const* layers, int64_t num_layers,
                                         switchyard_step step, void* context, int64_t* ran_again);

/* Both are JSON objects, valid until the next call for this layer. They wait. */
SWITCHYARD_C_API int switchyard_layer_stats(switchyard_layer* layer, const char** json);
SWITCHYARD_C_API int switchyard_layer_plan_status(switchyard_layer* layer, const char** json);
/* Fails if the last forward's plan reports bad ids, logits that are not finite, or an overflow. */
SWITCHYARD_C_API int switchyard_layer_check(switchyard_layer* layer);
/* The rows that a rank has room for; 0 with exact sizing. */
SWITCHYARD_C_API int64_t switchyard_layer_row_capacity(switchyard_layer* layer);
/* picks [E] of this rank. With `take` other than 0 it is collective over the batch: picks are those
 * of all ranks, and counting begins anew. */
SWITCHYARD_C_API int switchyard_layer_pick_counts(switchyard_layer* layer, int64_t take,
                                                  int64_t* picks, int64_t* num_tokens);

/* Checkpoints. */

typedef struct switchyard_checkpoint switchyard_checkpoint;

/* A safetensors file, an index, or a folder of them. */
SWITCHYARD_C_API int switchyard_checkpoint_open(const char* path,
                                                switchyard_checkpoint** checkpoint);
SWITCHYARD_C_API void switchyard_checkpoint_free(switchyard_checkpoint* checkpoint);
/* A JSON object of "metadata" and "tensors", valid as long as the checkpoint. */
SWITCHYARD_C_API int switchyard_checkpoint_contents(switchyard_checkpoint* checkpoint,
                                                    const char** json);
/* A tensor's bytes as the file has them, into `bytes` bytes of the host. */
SWITCHYARD_C_API int switchyard_checkpoint_read(switchyard_checkpoint* checkpoint, const char* name,
                                                void* into, int64_t bytes);
/* A whole tensor, and a rank's part of a block, into memory of the device; bf16 and f16 widen to
 * f32. They wait. */
SWITCHYARD_C_API int switchyard_checkpoint_load_tensor(switchyard_checkpoint* checkpoint,
                                                       switchyard_device* device, void* stream,
                                                       const char* name,
                                                       const switchyard_tensor* into);
SWITCHYARD_C_API int switchyard_checkpoint_load_block(
    switchyard_checkpoint* checkpoint, switchyard_device* device, void* stream, const char* prefix,
    const switchyard_placement* placement, int64_t rank, const switchyard_layer_weights* into);

typedef struct {
  const char* name;
  switchyard_tensor tensor;
} switchyard_named_tensor;

typedef struct {
  const char* prefix; /* "model.layers.3.mlp." */
  switchyard_placement placement;
  int64_t rank; /* in the placement */
  switchyard_layer_weights tensors;
} switchyard_checkpoint_block;

typedef struct {
  const switchyard_named_tensor* tensors; /* whole on every rank that lists them */
  int64_t num_tensors;
  const switchyard_checkpoint_block* blocks;
  int64_t num_blocks;
  const char* const* metadata; /* a key, its value, the next key, ... */
  int64_t num_metadata;        /* pairs */
  int64_t file_per_rank;       /* other than 0: the path is a folder */
} switchyard_checkpoint_contents_form;

/* Collective, over ranks that share a file system. */
SWITCHYARD_C_API int switchyard_checkpoint_save(switchyard_comm* comm, switchyard_device* device,
                                                void* stream, const char* path,
                                                const switchyard_checkpoint_contents_form* form);

#ifdef __cplusplus
}
#endif

#endif
