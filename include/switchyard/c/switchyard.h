/* The C interface: one rank's plan, experts and router over tensors of the caller's, on a CPU or a
 * GPU. It is what the Python package calls, and any other language can.
 *
 * All fields of all structs are 8 bytes wide, so that a caller without a C compiler can write them
 * as an array. Tensors are contiguous and in the device's memory; shapes are in brackets. A null
 * pointer is no tensor, where a comment allows that.
 *
 * Functions return switchyard_ok or what went wrong, and switchyard_last_error() says it in words.
 * They may be called from any thread; calls on one device wait for each other. On a GPU they put
 * their work on `stream` and return at once, except where a comment says that they wait. */
#ifndef SWITCHYARD_C_SWITCHYARD_H_
#define SWITCHYARD_C_SWITCHYARD_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SWITCHYARD_C_API __attribute__((visibility("default")))

/* Results. */
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

/* dtype of tokens, rows and weights, and of ids. */
enum { switchyard_f32 = 0, switchyard_bf16 = 1, switchyard_i32 = 2, switchyard_i64 = 3 };

SWITCHYARD_C_API const char* switchyard_version(void);
/* Of this thread's last call that failed; valid until the next one fails. */
SWITCHYARD_C_API const char* switchyard_last_error(void);

/* Devices. */

typedef struct switchyard_device switchyard_device;

/* A program's own allocator of a GPU's memory; allocate gives null where there is no more. */
typedef void* (*switchyard_allocate)(int64_t bytes, void* stream);
typedef void (*switchyard_free)(void* memory, void* stream);

SWITCHYARD_C_API int switchyard_device_cpu(int64_t num_threads, switchyard_device** device);
/* Without functions the device keeps a pool of its own. `portable` other than 0 leaves out kernels
 * that are made for one kind of GPU. */
SWITCHYARD_C_API int switchyard_device_cuda(int64_t ordinal, int64_t portable,
                                            switchyard_allocate allocate, switchyard_free release,
                                            switchyard_device** device);
SWITCHYARD_C_API void switchyard_device_free(switchyard_device* device);
/* How often calls have waited for this GPU so far. */
SWITCHYARD_C_API int64_t switchyard_device_host_syncs(switchyard_device* device);
/* Of a GPU's or the host's memory, in use or kept. */
SWITCHYARD_C_API int64_t switchyard_device_bytes_held(switchyard_device* device);

/* Plans: where the rows of every expert lie, as one i32 tensor of switchyard_plan_words() words. */

typedef struct {
  int64_t num_tokens;  /* T */
  int64_t top_k;       /* K */
  int64_t num_experts; /* E */
  int64_t alignment;   /* every group of rows begins at a multiple of it; 1: no padding */
  int64_t sentinels;   /* other than 0: ids of E and more are no pick, as -1 is */
} switchyard_plan_form;

/* The words of a plan, and the rows that are enough for every routing; -1 for an impossible form.
 */
SWITCHYARD_C_API int64_t switchyard_plan_words(const switchyard_plan_form* form);
SWITCHYARD_C_API int64_t switchyard_plan_most_rows(const switchyard_plan_form* form);

/* expert_ids [T, K] of id_dtype. On a CPU bad ids are an error; on a GPU they count as no pick, and
 * switchyard_plan_check finds them. */
SWITCHYARD_C_API int switchyard_plan_make(switchyard_device* device, void* stream,
                                          const switchyard_plan_form* form, const void* expert_ids,
                                          int64_t id_dtype, void* plan);
/* Waits. */
SWITCHYARD_C_API int switchyard_plan_check(switchyard_device* device, void* stream,
                                           const switchyard_plan_form* form, const void* plan);
/* The rows that the experts use, padding included. Waits. */
SWITCHYARD_C_API int switchyard_plan_num_rows(switchyard_device* device, void* stream,
                                              const switchyard_plan_form* form, const void* plan,
                                              int64_t* num_rows);
/* Where tables begin in the plan, in i32 words. */
typedef struct {
  int64_t slots;       /* [T, K]: the row of every pick; -1: none */
  int64_t row_offsets; /* [E + 1]: where the group of each expert begins */
  int64_t group_rows;  /* [E]: rows of each group, without padding */
  int64_t row_sources; /* [most_rows]: the pick t·K + k of every row */
} switchyard_plan_tables;
SWITCHYARD_C_API int switchyard_plan_find_tables(const switchyard_plan_form* form,
                                                 switchyard_plan_tables* tables);

/* Movement: tokens [T, H] to rows [R, H] and back; R is at least the plan's number of rows. */

typedef struct {
  switchyard_plan_form form;
  const void* plan;
  int64_t dtype;
  int64_t hidden;   /* H */
  int64_t num_rows; /* R */
} switchyard_moved;

/* rows[slot(t, k)] = x[t]; padding becomes 0, and rows beyond the plan's stay as they are. */
SWITCHYARD_C_API int switchyard_dispatch(switchyard_device* device, void* stream,
                                         const switchyard_moved* moved, const void* x, void* rows);
/* y[t] = Σ_k weights[t, k] · rows[slot(t, k)]; weights [T, K] f32, or none for 1. It is also the
 * gradient of dispatch. */
SWITCHYARD_C_API int switchyard_combine(switchyard_device* device, void* stream,
                                        const switchyard_moved* moved, const void* rows,
                                        const void* weights, void* y);
/* d_rows[slot(t, k)] = weights[t, k] · d_y[t]; d_weights[t, k] = <d_y[t], rows[slot(t, k)]>, where
 * both rows and d_weights are given. */
SWITCHYARD_C_API int switchyard_combine_backward(switchyard_device* device, void* stream,
                                                 const switchyard_moved* moved, const void* d_y,
                                                 const void* weights, const void* rows,
                                                 void* d_rows, void* d_weights);

/* Experts. */

typedef struct {
  int64_t hidden;       /* H */
  int64_t intermediate; /* I */
  int64_t dtype;
  int64_t activation; /* as in the order of switchyard::Activation */
  double clamp_limit;
  double gate_alpha;
  double up_offset;
} switchyard_experts_form;

/* Weights, or gradients of them. gate_up [E, 2I, H] holds the gates first, and is [E, I, H] for
 * activations without a gate. */
typedef struct {
  void* gate_up;
  void* down;         /* [E, H, I] */
  void* gate_up_bias; /* [E, 2I] or [E, I], or none */
  void* down_bias;    /* [E, H], or none; both biases or neither */
} switchyard_experts;

/* Values that a row leaves for backward: 2I with a gate, I without; -1 for an unknown activation.
 */
SWITCHYARD_C_API int64_t switchyard_inner_width(const switchyard_experts_form* form);

/* Tokens through the experts of a plan and back: y[t] = Σ_k weights[t, k] · expert(x[t]). */
typedef struct {
  switchyard_plan_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights;
  const void* plan;
  int64_t num_rows;         /* R: at least the plan's number of rows */
  const void* x;            /* [T, H] */
  const void* pick_weights; /* [T, K] f32 */
  void* inner;              /* [R, inner width]: kept for backward; none in inference */
} switchyard_moe;

SWITCHYARD_C_API int switchyard_moe_forward(switchyard_device* device, void* stream,
                                            const switchyard_moe* moe, void* y);

typedef struct {
  const void* d_y;              /* [T, H] */
  void* d_x;                    /* [T, H] */
  void* d_pick_weights;         /* [T, K] f32 */
  switchyard_experts gradients; /* of the weights' dtype; no gate_up: the experts are frozen */
  int64_t recompute;            /* other than 0: `inner` is memory only, and is computed again */
} switchyard_moe_gradients;

/* Uses `inner` up. */
SWITCHYARD_C_API int switchyard_moe_backward(switchyard_device* device, void* stream,
                                             const switchyard_moe* moe,
                                             const switchyard_moe_gradients* gradients);

/* Rows that somebody else has moved: the groups of a plan through their experts. */
typedef struct {
  switchyard_plan_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights;
  const void* plan;
  int64_t num_rows; /* R */
  void* rows;       /* [R, H] */
  void* inner;      /* [R, inner width], or none in inference */
} switchyard_rows;

SWITCHYARD_C_API int switchyard_rows_forward(switchyard_device* device, void* stream,
                                             const switchyard_rows* rows, void* out);
/* Uses `inner` up. d_out and d_rows are [R, H]. */
SWITCHYARD_C_API int switchyard_rows_backward(switchyard_device* device, void* stream,
                                              const switchyard_rows* rows, const void* d_out,
                                              void* d_rows, const switchyard_experts* gradients,
                                              int64_t recompute);

/* Routers. */

typedef struct {
  int64_t num_experts;
  int64_t top_k;
  int64_t sigmoid;    /* 0: softmax */
  int64_t score_bias; /* as in the order of switchyard::ScoreBias */
  int64_t normalise;  /* other than 0: weights of a token add up to `scale` */
  double scale;
  int64_t num_expert_groups;
  int64_t kept_expert_groups;
} switchyard_router_form;

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

/* expert_ids [T, K] i32, pick_weights [T, K] f32. A token whose logits are not finite has no picks:
 * first_non_finite [1] i64 is the first such token, or -1. */
SWITCHYARD_C_API int switchyard_route(switchyard_device* device, void* stream,
                                      const switchyard_router* router, void* expert_ids,
                                      void* pick_weights, void* first_non_finite);

typedef struct {
  const void* expert_ids;     /* [T, K] i32 */
  const void* d_pick_weights; /* [T, K] f32 */
  void* d_x;                  /* [T, H] */
  void* d_gate;               /* [E, H] f32 */
  void* d_gate_bias;          /* [E] f32, or none */
} switchyard_router_gradients;
SWITCHYARD_C_API int switchyard_route_backward(switchyard_device* device, void* stream,
                                               const switchyard_router* router,
                                               const switchyard_router_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif
