/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface, part 3: a framework's own ranks, and experts over them whose plans and saved
 * state are tensors of the caller.
 *
 * Structs, errors and handles follow the conventions of layers.h. Every function of a dispatcher is
 * collective unless its comment says otherwise. */
#ifndef SWITCHYARD_C_PARALLEL_H_
#define SWITCHYARD_C_PARALLEL_H_

#include "switchyard/c/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Functions with which a framework moves host bytes between its ranks. All are required. Each
 * returns switchyard_ok, or the kind of error after reporting it with switchyard_fail, and must
 * return within the timeout. */
typedef struct {
  /* Exchanges bytes with every rank: send_bytes and recv_bytes [size] are the sizes to and from
   * each rank, and the data is in rank order. */
  int (*all_to_all)(void* context, const void* send, const int64_t* send_bytes, void* recv,
                    const int64_t* recv_bytes);
  /* Concatenates `bytes` bytes of every rank, in rank order, into recv [size * bytes]. */
  int (*all_gather)(void* context, const void* send, void* recv, int64_t bytes);
  int (*broadcast)(void* context, void* data, int64_t bytes, int64_t root);
  int (*barrier)(void* context);
  /* Tells the ranks that wait for this one that it gives up, and why. */
  void (*give_up)(void* context, const char* reason);
} switchyard_comm_functions;

/* Makes a communicator over a framework's ranks. Not collective. The functions and their context
 * must stay valid as long as the communicator, or any layer or dispatcher over it. It cannot be
 * split. */
SWITCHYARD_C_API int switchyard_comm_foreign(int64_t rank, int64_t size, int64_t timeout_ms,
                                             const switchyard_comm_functions* functions,
                                             void* context, switchyard_comm** comm);

/* Plans and moves tokens between the ranks of a communicator. */
typedef struct switchyard_dispatcher switchyard_dispatcher;

/* Makes a dispatcher over two or more ranks that can access each other's memory: threads of one
 * process, or processes of one host. It computes on a private device like the given one, as layers
 * do. `sentinels` nonzero: ids of E or more mean no pick. */
SWITCHYARD_C_API int switchyard_dispatcher_make(switchyard_comm* comm,
                                                const switchyard_placement* placement,
                                                int64_t alignment, int64_t sentinels,
                                                switchyard_device* device,
                                                switchyard_dispatcher** dispatcher);
SWITCHYARD_C_API void switchyard_dispatcher_free(switchyard_dispatcher* dispatcher);
/* Returns how often calls have waited for the dispatcher's own device. Not collective. */
SWITCHYARD_C_API int64_t switchyard_dispatcher_host_syncs(switchyard_dispatcher* dispatcher);

/* The sizes of a plan, which is one i32 tensor aligned to 16 bytes. */
typedef struct {
  int64_t num_tokens;   /* T of this rank */
  int64_t top_k;        /* K */
  int64_t num_rows;     /* R */
  int64_t num_received; /* D: tokens that this rank's experts receive, each once */
} switchyard_shared_form;

/* Returns the number of i32 words of a plan: those of a plan without tokens, plus five times T·K
 * rounded up to a multiple of four. Returns -1 for invalid arguments. Not collective. */
SWITCHYARD_C_API int64_t switchyard_shared_plan_words(const switchyard_placement* placement,
                                                      int64_t rank, int64_t num_tokens,
                                                      int64_t top_k);
/* Makes a plan of expert_ids [T, K] of id_dtype. The plan is exact if num_rows is 0. Otherwise
 * num_rows and num_received are the capacities of a bounded plan, the same on all ranks;
 * num_received of 0 means as many as rows. */
SWITCHYARD_C_API int switchyard_shared_plan_make(switchyard_dispatcher* dispatcher, void* stream,
                                                 const switchyard_shared_form* form,
                                                 const void* expert_ids, int64_t id_dtype,
                                                 void* plan);
/* Fills in num_rows and num_received of an exact plan. Fails for bad ids, in the same way on every
 * rank. Not collective. Waits. */
SWITCHYARD_C_API int switchyard_shared_plan_sizes(switchyard_dispatcher* dispatcher, void* stream,
                                                  switchyard_shared_form* form, const void* plan);
/* Fails if a bounded plan found bad ids or has no room for its rows or tokens, in the same way on
 * every rank. Not collective. Waits. */
SWITCHYARD_C_API int switchyard_shared_plan_check(switchyard_dispatcher* dispatcher, void* stream,
                                                  const switchyard_shared_form* form,
                                                  const void* plan);
/* Offsets of the tables in a plan, in i32 words. */
typedef struct {
  int64_t row_offsets;   /* [e + 1]: first row of each of this rank's groups */
  int64_t group_rows;    /* [e]: rows of each group, without padding */
  int64_t overflow;      /* [1] i64: nonzero if some rank has no room */
  int64_t needed_rows;   /* [ranks] i64: rows that the routing needs */
  int64_t needed_tokens; /* [ranks] i64: tokens that each rank receives */
  /* [T, K]: the row of every pick at its owner, or -1. The owners, [T, K], follow at T·K words
   * rounded up to a multiple of four. */
  int64_t slots;
} switchyard_shared_tables;
SWITCHYARD_C_API int switchyard_shared_plan_find_tables(const switchyard_placement* placement,
                                                        int64_t rank,
                                                        switchyard_shared_tables* tables);

/* Tokens that ranks move to each other's rows by a plan. */
typedef struct {
  switchyard_shared_form form;
  const void* plan;
  int64_t dtype;
  int64_t hidden; /* H */
} switchyard_shared_moved;

/* Movement as in switchyard.h, except that rows [R, H] are those of this rank's experts, and that
 * combine_backward requires weights, rows and d_weights. */
SWITCHYARD_C_API int switchyard_shared_dispatch(switchyard_dispatcher* dispatcher, void* stream,
                                                const switchyard_shared_moved* moved, const void* x,
                                                void* rows);
SWITCHYARD_C_API int switchyard_shared_combine(switchyard_dispatcher* dispatcher, void* stream,
                                               const switchyard_shared_moved* moved,
                                               const void* rows, const void* weights, void* y);
SWITCHYARD_C_API int switchyard_shared_combine_backward(
    switchyard_dispatcher* dispatcher, void* stream, const switchyard_shared_moved* moved,
    const void* d_y, const void* weights, const void* rows, void* d_rows, void* d_weights);

/* Tokens of all ranks sent through the experts of all ranks and back. */
typedef struct {
  switchyard_shared_form plan_form;
  switchyard_experts_form form;
  switchyard_experts weights; /* the e experts of this rank */
  const void* plan;
  const void* x;            /* [T, H] */
  const void* pick_weights; /* [T, K] f32 */
  /* State that forward keeps for backward. */
  int64_t keep;        /* 0: nothing is kept, and the next four may be null */
  void* tokens;        /* [D, H] */
  void* token_weights; /* [D, K] f32 */
  void* row_sources;   /* [R] i32 */
  void* inner;         /* [R, inner width]; backward overwrites it */
} switchyard_shared_moe;

/* Computes y [T, H]. */
SWITCHYARD_C_API int switchyard_shared_moe_forward(switchyard_dispatcher* dispatcher, void* stream,
                                                   const switchyard_shared_moe* moe, void* y);
/* Computes the gradients of a forward with `keep`. Does not read x and pick_weights. */
SWITCHYARD_C_API int switchyard_shared_moe_backward(switchyard_dispatcher* dispatcher, void* stream,
                                                    const switchyard_shared_moe* moe,
                                                    const switchyard_moe_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif
