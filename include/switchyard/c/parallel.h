/* The C interface, third part: ranks of a framework's own, and experts over them whose plans, and
 * all that backward needs, are tensors of the caller's.
 *
 * Structs, errors and handles are as in layers.h. Every function of a dispatcher is collective
 * unless a comment says otherwise. */
#ifndef SWITCHYARD_C_PARALLEL_H_
#define SWITCHYARD_C_PARALLEL_H_

#include "switchyard/c/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a framework moves bytes of the host between its ranks. Functions return switchyard_ok, or
 * what went wrong after telling switchyard_fail; each ends within the timeout. */
typedef struct {
  /* send_bytes and recv_bytes [size]: for, and from, every rank; all in the order of ranks. */
  int (*all_to_all)(void* context, const void* send, const int64_t* send_bytes, void* recv,
                    const int64_t* recv_bytes);
  /* recv [size * bytes], by rank. */
  int (*all_gather)(void* context, const void* send, void* recv, int64_t bytes);
  int (*broadcast)(void* context, void* data, int64_t bytes, int64_t root);
  int (*barrier)(void* context);
  /* This rank gives up: whoever waits for it should be told why. */
  void (*give_up)(void* context, const char* reason);
} switchyard_comm_functions;

/* Not collective. The functions and their context stay valid as long as the communicator, or a
 * layer or dispatcher over it. It cannot be split. */
SWITCHYARD_C_API int switchyard_comm_foreign(int64_t rank, int64_t size, int64_t timeout_ms,
                                             const switchyard_comm_functions* functions,
                                             void* context, switchyard_comm** comm);

typedef struct switchyard_dispatcher switchyard_dispatcher;

/* Between ranks that reach each other's memory: at least two threads of one process, or processes
 * of one host. The device is as for layers. */
SWITCHYARD_C_API int switchyard_dispatcher_make(switchyard_comm* comm,
                                                const switchyard_placement* placement,
                                                int64_t alignment, int64_t sentinels,
                                                switchyard_device* device,
                                                switchyard_dispatcher** dispatcher);
SWITCHYARD_C_API void switchyard_dispatcher_free(switchyard_dispatcher* dispatcher);
/* Not collective: of the dispatcher's own device. */
SWITCHYARD_C_API int64_t switchyard_dispatcher_host_syncs(switchyard_dispatcher* dispatcher);

/* A plan, as one i32 tensor on 16 bytes. */
typedef struct {
  int64_t num_tokens;   /* T of this rank */
  int64_t top_k;        /* K */
  int64_t num_rows;     /* R */
  int64_t num_received; /* D: tokens that come to this rank's experts, each once */
} switchyard_shared_form;

/* Not collective. The words of a plan: those of no tokens, and five times T·K rounded up to a
 * multiple of four; -1 for impossible numbers. */
SWITCHYARD_C_API int64_t switchyard_shared_plan_words(const switchyard_placement* placement,
                                                      int64_t rank, int64_t num_tokens,
                                                      int64_t top_k);
/* With num_rows of 0 the plan is exact. Otherwise num_rows and num_received are the capacities of a
 * bounded plan, the same on all ranks; num_received of 0: as many as rows. */
SWITCHYARD_C_API int switchyard_shared_plan_make(switchyard_dispatcher* dispatcher, void* stream,
                                                 const switchyard_shared_form* form,
                                                 const void* expert_ids, int64_t id_dtype,
                                                 void* plan);
/* Not collective, but the same on every rank. Fills in num_rows and num_received of an exact plan;
 * bad ids are an error. Waits. */
SWITCHYARD_C_API int switchyard_shared_plan_sizes(switchyard_dispatcher* dispatcher, void* stream,
                                                  switchyard_shared_form* form, const void* plan);
/* Not collective, but the same on every rank. Fails if a bounded plan met bad ids, or has no room
 * for its rows or tokens. Waits. */
SWITCHYARD_C_API int switchyard_shared_plan_check(switchyard_dispatcher* dispatcher, void* stream,
                                                  const switchyard_shared_form* form,
                                                  const void* plan);
/* Not collective. Where tables begin in a plan, in i32 words. */
typedef struct {
  int64_t row_offsets;   /* [e + 1]: where the group of each expert of this rank begins */
  int64_t group_rows;    /* [e]: rows of each group, without padding */
  int64_t overflow;      /* [1] i64: other than 0 if some rank has no room */
  int64_t needed_rows;   /* [ranks] i64: that the routing asks for */
  int64_t needed_tokens; /* [ranks] i64: that every rank receives */
  /* [T, K]: the row of every pick at its owner; -1: none. T·K rounded up to a multiple of four
   * words behind it: [T, K], that owner. */
  int64_t slots;
} switchyard_shared_tables;
SWITCHYARD_C_API int switchyard_shared_plan_find_tables(const switchyard_placement* placement,
                                                        int64_t rank,
                                                        switchyard_shared_tables* tables);

typedef struct {
  switchyard_shared_form form;
  const void* plan;
  int64_t dtype;
  int64_t hidden; /* H */
} switchyard_shared_moved;

/* Movement, as in switchyard.h, but rows [R, H] are those of this rank's experts, and
 * combine_backward is given weights, rows and d_weights. */
SWITCHYARD_C_API int switchyard_shared_dispatch(switchyard_dispatcher* dispatcher, void* stream,
                                                const switchyard_shared_moved* moved, const void* x,
                                                void* rows);
SWITCHYARD_C_API int switchyard_shared_combine(switchyard_dispatcher* dispatcher, void* stream,
                                               const switchyard_shared_moved* moved,
                                               const void* rows, const void* weights, void* y);
SWITCHYARD_C_API int switchyard_shared_combine_backward(
    switchyard_dispatcher* dispatcher, void* stream, const switchyard_shared_moved* moved,
    const void* d_y, const void* weights, const void* rows, void* d_rows, void* d_weights);

/* Tokens of all ranks through the experts of all ranks and back. */
typedef struct {
  switchyard_shared_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights; /* of this rank's e experts */
  const void* plan;
  const void* x;            /* [T, H] */
  const void* pick_weights; /* [T, K] f32 */
  /* What forward leaves for backward. */
  int64_t keep;        /* 0: nothing, and the next four may be null */
  void* tokens;        /* [D, H] */
  void* token_weights; /* [D, K] f32 */
  void* row_sources;   /* [R] i32 */
  void* inner;         /* [R, inner width]; backward uses it up */
} switchyard_shared_moe;

SWITCHYARD_C_API int switchyard_shared_moe_forward(switchyard_dispatcher* dispatcher, void* stream,
                                                   const switchyard_shared_moe* moe, void* y);
/* x and pick_weights are not needed. */
SWITCHYARD_C_API int switchyard_shared_moe_backward(switchyard_dispatcher* dispatcher, void* stream,
                                                    const switchyard_shared_moe* moe,
                                                    const switchyard_moe_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif
