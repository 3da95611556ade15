/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface: one rank's plan, experts and router over tensors of the caller, on a CPU or a
 * GPU. The Python package is built on it, and other languages can use it in the same way.
 *
 * All fields of all structs are 8 bytes wide, so a caller without a C compiler can write them as an
 * array. Tensors are contiguous and in the device's memory; shapes are given in brackets. A null
 * pointer means no tensor, where a comment allows that.
 *
 * Functions return switchyard_ok or the kind of error; switchyard_last_error() describes it. They
 * may be called from any thread; calls on one device are serialised. On a GPU they enqueue their
 * work on `stream` and return at once, unless a comment says that they wait. */
#ifndef SWITCHYARD_C_SWITCHYARD_H_
#define SWITCHYARD_C_SWITCHYARD_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Exports a function from the library. */
#define SWITCHYARD_C_API __attribute__((visibility("default")))

/* Result codes. */
enum {
  switchyard_ok = 0,
  switchyard_invalid_argument = 1,
  switchyard_unsupported = 2,
  switchyard_communication_error = 3,
  switchyard_storage_error = 4,
  switchyard_device_error = 5,
  switchyard_internal_error = 6,
  switchyard_out_of_memory = 7,
  switchyard_other_error = 8
};

/* Dtypes of tokens, rows and weights, and of ids. */
enum { switchyard_f32 = 0, switchyard_bf16 = 1, switchyard_i32 = 2, switchyard_i64 = 3 };

/* Returns the version of the library, such as "0.2.0". */
SWITCHYARD_C_API const char* switchyard_version(void);
/* Returns the message of this thread's last failed call, valid until another call of the thread
 * fails. */
SWITCHYARD_C_API const char* switchyard_last_error(void);

/* Devices. */

/* The CPU threads or the GPU that calls compute on. */
typedef struct switchyard_device switchyard_device;

/* A program's own allocator of GPU memory. `allocate` returns null if there is no memory left. */
typedef void* (*switchyard_allocate)(int64_t bytes, void* stream);
typedef void (*switchyard_free)(void* memory, void* stream);

/* Makes a CPU device. */
SWITCHYARD_C_API int switchyard_device_cpu(int64_t num_threads, switchyard_device** device);
/* Makes a GPU device. Without functions the device keeps its own memory pool. If `portable` is
 * nonzero, it uses no kernels made for one kind of GPU. */
SWITCHYARD_C_API int switchyard_device_cuda(int64_t ordinal, int64_t portable,
                                            switchyard_allocate allocate, switchyard_free release,
                                            switchyard_device** device);
SWITCHYARD_C_API void switchyard_device_free(switchyard_device* device);
/* Returns how often calls have waited for this GPU. */
SWITCHYARD_C_API int64_t switchyard_device_host_syncs(switchyard_device* device);
/* Returns the number of bytes of GPU or host memory that are in use or kept for reuse. */
SWITCHYARD_C_API int64_t switchyard_device_bytes_held(switchyard_device* device);

/* Plans: the layout of every expert's rows, as one i32 tensor of switchyard_plan_words() words,
 * aligned to 8 bytes. */

/* The sizes of a plan. */
typedef struct {
  int64_t num_tokens;  /* T */
  int64_t top_k;       /* K */
  int64_t num_experts; /* E */
  int64_t alignment;   /* every group begins at a multiple of it; 1: no padding */
  int64_t sentinels;   /* nonzero: ids of E or more mean no pick, like -1 */
} switchyard_plan_form;

/* Return the number of i32 words of a plan, and a number of rows that is enough for every routing;
 * -1 for an impossible form. */
SWITCHYARD_C_API int64_t switchyard_plan_words(const switchyard_plan_form* form);
SWITCHYARD_C_API int64_t switchyard_plan_most_rows(const switchyard_plan_form* form);

/* Makes a plan of expert_ids [T, K] of id_dtype. On a CPU bad ids are an error; on a GPU they count
 * as no pick, and switchyard_plan_check reports them. */
SWITCHYARD_C_API int switchyard_plan_make(switchyard_device* device, void* stream,
                                          const switchyard_plan_form* form, const void* expert_ids,
                                          int64_t id_dtype, void* plan);
/* Fails if the plan was made from bad ids. Waits. */
SWITCHYARD_C_API int switchyard_plan_check(switchyard_device* device, void* stream,
                                           const switchyard_plan_form* form, const void* plan);
/* Returns the number of rows that the experts use, padding included. Waits. */
SWITCHYARD_C_API int switchyard_plan_num_rows(switchyard_device* device, void* stream,
                                              const switchyard_plan_form* form, const void* plan,
                                              int64_t* num_rows);
/* Offsets of the tables in a plan, in i32 words. */
typedef struct {
  int64_t slots;       /* [T, K]: the row of every pick, or -1 */
  int64_t row_offsets; /* [E + 1]: first row of each expert's group */
  int64_t group_rows;  /* [E]: rows of each group, without padding */
  int64_t row_sources; /* [most_rows]: the pick t·K + k of every row */
} switchyard_plan_tables;
/* Fills `tables` for plans of this form. */
SWITCHYARD_C_API int switchyard_plan_find_tables(const switchyard_plan_form* form,
                                                 switchyard_plan_tables* tables);

/* Movement of tokens [T, H] to rows [R, H] and back. R is at least the plan's number of rows. */

/* Tokens that a plan moves to rows. */
typedef struct {
  switchyard_plan_form form;
  const void* plan;
  int64_t dtype;
  int64_t hidden;   /* H */
  int64_t num_rows; /* R */
} switchyard_moved;

/* Computes rows[slot(t, k)] = x[t]. Padding becomes 0; rows beyond the plan's do not change. */
SWITCHYARD_C_API int switchyard_dispatch(switchyard_device* device, void* stream,
                                         const switchyard_moved* moved, const void* x, void* rows);
/* Computes y[t] = Σ_k weights[t, k] · rows[slot(t, k)]. weights is [T, K] f32, or null for 1. With
 * null weights this is also the gradient of dispatch. */
SWITCHYARD_C_API int switchyard_combine(switchyard_device* device, void* stream,
                                        const switchyard_moved* moved, const void* rows,
                                        const void* weights, void* y);
/* Computes d_rows[slot(t, k)] = weights[t, k] · d_y[t] and, if both rows and d_weights are given,
 * d_weights[t, k] = <d_y[t], rows[slot(t, k)]>. weights may be null for 1. */
SWITCHYARD_C_API int switchyard_combine_backward(switchyard_device* device, void* stream,
                                                 const switchyard_moved* moved, const void* d_y,
                                                 const void* weights, const void* rows,
                                                 void* d_rows, void* d_weights);

/* Experts. */

/* The sizes and the activation of experts. */
typedef struct {
  int64_t hidden;       /* H */
  int64_t intermediate; /* I */
  int64_t dtype;
  int64_t activation; /* number in the order of switchyard::Activation */
  double clamp_limit;
  double gate_alpha;
  double up_offset;
} switchyard_experts_form;

/* The weights of experts, or their gradients. gate_up is [E, 2I, H], gates first, or [E, I, H] for
 * activations without a gate. */
typedef struct {
  void* gate_up;
  void* down;         /* [E, H, I] */
  void* gate_up_bias; /* [E, 2I] or [E, I], or none */
  void* down_bias;    /* [E, H], or none; give both biases or neither */
} switchyard_experts;

/* Returns the number of values per row that forward keeps for backward: 2I with a gate, I without;
 * -1 for an unknown activation. */
SWITCHYARD_C_API int64_t switchyard_inner_width(const switchyard_experts_form* form);

/* Tokens sent through the experts of a plan and back: y[t] = Σ_k weights[t, k] · expert(x[t]). */
typedef struct {
  switchyard_plan_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights;
  const void* plan;
  /* R: at least the plan's number of rows, at most switchyard_plan_most_rows(). */
  int64_t num_rows;
  const void* x;            /* [T, H] */
  const void* pick_weights; /* [T, K] f32 */
  void* inner;              /* [R, inner width], kept for backward; none in inference */
} switchyard_moe;

/* Computes y [T, H]. */
SWITCHYARD_C_API int switchyard_moe_forward(switchyard_device* device, void* stream,
                                            const switchyard_moe* moe, void* y);

/* The gradients that switchyard_moe_backward reads and writes. */
typedef struct {
  const void* d_y;      /* [T, H] */
  void* d_x;            /* [T, H] */
  void* d_pick_weights; /* [T, K] f32 */
  /* In the weights' dtype; without gate_up the experts are frozen. */
  switchyard_experts gradients;
  /* Nonzero: `inner` is only scratch memory, and its values are recomputed. */
  int64_t recompute;
} switchyard_moe_gradients;

/* Computes the gradients of switchyard_moe_forward. Overwrites `inner`. */
SWITCHYARD_C_API int switchyard_moe_backward(switchyard_device* device, void* stream,
                                             const switchyard_moe* moe,
                                             const switchyard_moe_gradients* gradients);

/* Rows that the caller has moved, to be sent through the experts of a plan. */
typedef struct {
  switchyard_plan_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights;
  const void* plan;
  int64_t num_rows; /* R */
  void* rows;       /* [R, H] */
  void* inner;      /* [R, inner width], or none in inference */
} switchyard_rows;

/* Computes out [R, H]. */
SWITCHYARD_C_API int switchyard_rows_forward(switchyard_device* device, void* stream,
                                             const switchyard_rows* rows, void* out);
/* Computes d_rows [R, H] and the weights' gradients from d_out [R, H]. Overwrites `inner`. */
SWITCHYARD_C_API int switchyard_rows_backward(switchyard_device* device, void* stream,
                                              const switchyard_rows* rows, const void* d_out,
                                              void* d_rows, const switchyard_experts* gradients,
                                              int64_t recompute);

/* Routers. */

/* The options of a router, as in switchyard::RouterOptions. */
typedef struct {
  int64_t num_experts;
  int64_t top_k;
  int64_t sigmoid;    /* 0: softmax */
  int64_t score_bias; /* number in the order of switchyard::ScoreBias */
  int64_t normalise;  /* nonzero: the weights of a token add up to `scale` */
  double scale;
  int64_t num_expert_groups;
  int64_t kept_expert_groups;
} switchyard_router_form;

/* The tokens and the weights of a router. */
typedef struct {
  switchyard_router_form form;
  int64_t num_tokens;
  int64_t hidden;
  int64_t dtype;          /* of x */
  int64_t gate_dtype;     /* of gate and gate_bias */
  const void* x;          /* [T, H] */
  const void* gate;       /* [E, H] */
  const void* gate_bias;  /* [E], or none */
  const void* score_bias; /* [E] f32, or none */
} switchyard_router;

/* Computes expert_ids [T, K] i32 and pick_weights [T, K] f32. A token whose logits are not finite
 * has no picks; first_non_finite [1] i64 becomes the first such token, or -1. */
SWITCHYARD_C_API int switchyard_route(switchyard_device* device, void* stream,
                                      const switchyard_router* router, void* expert_ids,
                                      void* pick_weights, void* first_non_finite);

/* The gradients that switchyard_route_backward reads and writes. */
typedef struct {
  const void* expert_ids;     /* [T, K] i32 */
  const void* d_pick_weights; /* [T, K] f32 */
  void* d_x;                  /* [T, H] */
  void* d_gate;               /* [E, H] f32 */
  void* d_gate_bias;          /* [E] f32, or none */
} switchyard_router_gradients;
/* Computes the gradients of switchyard_route. */
SWITCHYARD_C_API int switchyard_route_backward(switchyard_device* device, void* stream,
                                               const switchyard_router* router,
                                               const switchyard_router_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif
