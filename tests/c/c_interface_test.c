/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface from C: plans, a whole layer and its gradients beside naive loops, layers over
 * one rank, and errors in words. Prints what fails, and returns how much did. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "switchyard/c/layers.h"
#include "switchyard/c/switchyard.h"

enum { T = 9, K = 2, E = 4, H = 8, I = 6, ROWS = T * K, IDS = T * K };

static int failures = 0;

#define CHECK(ok)                                                                               \
  do {                                                                                          \
    if (!(ok)) {                                                                                \
      ++failures;                                                                               \
      printf("%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #ok, switchyard_last_error()); \
    }                                                                                           \
  } while (0)

typedef struct {
  float x[T * H];
  float d_y[T * H];
  float picks[IDS];
  float gate_up[E * 2 * I * H];
  float down[E * H * I];
  int32_t ids[IDS];
} problem;

static float next_value(uint32_t* state) {
  *state = *state * 1664525U + 1013904223U;
  return (float)(*state >> 8) / 8388608.0F - 1.0F;
}

static void fill(float* values, int count, uint32_t* state) {
  for (int i = 0; i < count; ++i) values[i] = 0.5F * next_value(state);
}

static void make_problem(problem* p) {
  uint32_t state = 17;
  fill(p->x, T * H, &state);
  fill(p->d_y, T * H, &state);
  fill(p->picks, IDS, &state);
  fill(p->gate_up, E * 2 * I * H, &state);
  fill(p->down, E * H * I, &state);
  for (int t = 0; t < T; ++t) {
    p->ids[t * K] = t % E;
    p->ids[t * K + 1] = t == 3 ? -1 : (t + 1 + t / E) % E;
  }
}

static double dot(const float* a, const float* b, int count) {
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += (double)a[i] * (double)b[i];
  return sum;
}

/* y[t] += weight * expert(x[t]) */
static void add_expert(const problem* p, int t, int expert, double weight, double* y) {
  double act[I];
  for (int i = 0; i < I; ++i) {
    const double g = dot(&p->gate_up[(expert * 2 * I + i) * H], &p->x[t * H], H);
    const double u = dot(&p->gate_up[(expert * 2 * I + I + i) * H], &p->x[t * H], H);
    act[i] = g / (1.0 + exp(-g)) * u;
  }
  for (int h = 0; h < H; ++h) {
    for (int i = 0; i < I; ++i) {
      y[t * H + h] += weight * (double)p->down[(expert * H + h) * I + i] * act[i];
    }
  }
}

static void reference(const problem* p, double* y) {
  memset(y, 0, T * H * sizeof(double));
  for (int t = 0; t < T; ++t) {
    for (int k = 0; k < K; ++k) {
      const int expert = p->ids[t * K + k];
      if (expert >= 0) add_expert(p, t, expert, (double)p->picks[t * K + k], y);
    }
  }
}

/* The gradients are those of this sum. */
static double reference_loss(const problem* p) {
  double y[T * H];
  double loss = 0.0;
  reference(p, y);
  for (int i = 0; i < T * H; ++i) loss += y[i] * (double)p->d_y[i];
  return loss;
}

static int is_close(double a, double b, double tolerance) {
  return fabs(a - b) <= tolerance * (1.0 + fabs(b));
}

/* Gradients of some values beside difference quotients. */
static void check_gradient(const problem* p, float* values, const float* gradient, int count) {
  for (int i = 0; i < count; i += 1 + count / 7) {
    const float before = values[i];
    const float step = 0.015625F;
    values[i] = before + step;
    const double up = reference_loss(p);
    values[i] = before - step;
    const double down = reference_loss(p);
    values[i] = before;
    CHECK(is_close((double)gradient[i], (up - down) / (2.0 * (double)step), 1e-3));
  }
}

static const switchyard_plan_form kPlan = {T, K, E, 1, 0};

static int32_t* test_plan(switchyard_device* device, const problem* p) {
  const int64_t words = switchyard_plan_words(&kPlan);
  CHECK(words > 0 && switchyard_plan_most_rows(&kPlan) == ROWS);
  int32_t* plan = calloc((size_t)words, sizeof(int32_t));
  CHECK(switchyard_plan_make(device, NULL, &kPlan, p->ids, switchyard_i32, plan) == switchyard_ok);
  int64_t rows = 0;
  CHECK(switchyard_plan_num_rows(device, NULL, &kPlan, plan, &rows) == switchyard_ok);
  CHECK(rows == ROWS - 1);
  switchyard_plan_tables tables;
  CHECK(switchyard_plan_find_tables(&kPlan, &tables) == switchyard_ok);
  int64_t next = 0;
  for (int expert = 0; expert < E; ++expert) {
    CHECK(plan[tables.row_offsets + expert] == next);
    for (int pick = 0; pick < IDS; ++pick) {
      if (p->ids[pick] == expert) CHECK(plan[tables.slots + pick] == next++);
    }
  }
  CHECK(plan[tables.slots + 3 * K + 1] == -1);
  return plan;
}

static switchyard_moe moe_of(problem* p, const int32_t* plan, float* inner) {
  const switchyard_moe moe = {
      .plan_form = kPlan,
      .form = {H, I, switchyard_f32, 0, 7.0, 1.702, 1.0},
      .weights = {.gate_up = p->gate_up, .down = p->down},
      .plan = plan,
      .num_rows = ROWS,
      .x = p->x,
      .pick_weights = p->picks,
      .inner = inner,
  };
  return moe;
}

static void test_moe(switchyard_device* device, problem* p, const int32_t* plan) {
  static float inner[ROWS * 2 * I];
  static float y[T * H];
  static float d_x[T * H];
  static float d_picks[IDS];
  static float d_gate_up[E * 2 * I * H];
  static float d_down[E * H * I];
  double wanted[T * H];
  const switchyard_moe moe = moe_of(p, plan, inner);
  CHECK(switchyard_moe_forward(device, NULL, &moe, y) == switchyard_ok);
  reference(p, wanted);
  for (int i = 0; i < T * H; ++i) CHECK(is_close((double)y[i], wanted[i], 1e-5));
  const switchyard_moe_gradients gradients = {
      .d_y = p->d_y,
      .d_x = d_x,
      .d_pick_weights = d_picks,
      .gradients = {.gate_up = d_gate_up, .down = d_down},
      .recompute = 0,
  };
  CHECK(switchyard_moe_backward(device, NULL, &moe, &gradients) == switchyard_ok);
  check_gradient(p, p->x, d_x, T * H);
  check_gradient(p, p->gate_up, d_gate_up, E * 2 * I * H);
  check_gradient(p, p->down, d_down, E * H * I);
  p->picks[3 * K + 1] = 0.0F; /* of a pick that is none */
  check_gradient(p, p->picks, d_picks, IDS);
}

static switchyard_tensor tensor(void* data, int64_t rows, int64_t columns) {
  const switchyard_tensor result = {data, switchyard_f32, 2, {rows, columns, 0, 0}};
  return result;
}

static switchyard_tensor tensor_of_experts(void* data, int64_t rows, int64_t columns) {
  const switchyard_tensor result = {data, switchyard_f32, 3, {E, rows, columns, 0}};
  return result;
}

/* A layer of one rank that is given its picks. */
static void test_layer(switchyard_device* device, problem* p) {
  switchyard_comm* comm = NULL;
  switchyard_layer* layer = NULL;
  switchyard_layer_form form = {.experts = {H, I, switchyard_f32, 0, 7.0, 1.702, 1.0},
                                .alignment = 1};
  int32_t owners[E];
  const switchyard_placement placement = {owners, E, 1};
  CHECK(switchyard_router_preset("mixtral", E, K, &form.router) == switchyard_ok);
  CHECK(switchyard_placement_contiguous(E, 1, owners) == switchyard_ok);
  CHECK(switchyard_comm_connect("threads", 1000, &comm) == switchyard_ok);
  CHECK(switchyard_layer_make(comm, NULL, &placement, &form, device, &layer) == switchyard_ok);
  static float y[T * H];
  double wanted[T * H];
  const switchyard_layer_weights weights = {.gate_up = tensor_of_experts(p->gate_up, 2 * I, H),
                                            .down = tensor_of_experts(p->down, H, I)};
  switchyard_layer_input input = {.x = tensor(p->x, T, H),
                                  .expert_ids = tensor(p->ids, T, K),
                                  .expert_weights = tensor(p->picks, T, K)};
  input.expert_ids.dtype = switchyard_i32;
  const switchyard_tensor out = tensor(y, T, H);
  CHECK(switchyard_layer_forward(layer, NULL, &weights, &input, &out, NULL) == switchyard_ok);
  reference(p, wanted);
  for (int i = 0; i < T * H; ++i) CHECK(is_close((double)y[i], wanted[i], 1e-5));
  input.x.extents[1] = H - 1;
  CHECK(switchyard_layer_forward(layer, NULL, &weights, &input, &out, NULL) ==
        switchyard_invalid_argument);
  CHECK(strstr(switchyard_last_error(), "x is f32 [9,7]") != NULL);
  switchyard_comm_free(comm); /* which the layer still has */
  switchyard_layer_free(layer);
  switchyard_layer_free(NULL);
}

static void test_errors(switchyard_device* device, problem* p, int32_t* plan) {
  switchyard_device* none = NULL;
  CHECK(switchyard_device_cpu(0, &none) == switchyard_invalid_argument && none == NULL);
  CHECK(strcmp(switchyard_last_error(), "num_threads (0) must be 1 to 4096") == 0);
  const switchyard_plan_form bad = {T, K, 0, 1, 0};
  CHECK(switchyard_plan_words(&bad) == -1);
  CHECK(strcmp(switchyard_last_error(), "num_experts (0) must be positive") == 0);
  const int32_t before = p->ids[5];
  p->ids[5] = E;
  CHECK(switchyard_plan_make(device, NULL, &kPlan, p->ids, switchyard_i32, plan) ==
        switchyard_invalid_argument);
  CHECK(strstr(switchyard_last_error(), "expert_ids[2,1] is 4") != NULL);
  p->ids[5] = before;
  const switchyard_moe moe = moe_of(p, plan, NULL);
  CHECK(switchyard_moe_forward(device, NULL, &moe, NULL) == switchyard_invalid_argument);
  CHECK(strcmp(switchyard_last_error(), "y is a null pointer") == 0);
  CHECK(switchyard_fail(switchyard_other_error, "mine") == switchyard_other_error);
  CHECK(strcmp(switchyard_last_error(), "mine") == 0);
}

int main(void) {
  problem* p = malloc(sizeof(problem));
  switchyard_device* device = NULL;
  make_problem(p);
  CHECK(strlen(switchyard_version()) > 0);
  CHECK(switchyard_device_cpu(2, &device) == switchyard_ok);
  int32_t* plan = test_plan(device, p);
  test_moe(device, p, plan);
  test_layer(device, p);
  test_errors(device, p, plan);
  switchyard_device_free(device);
  free(plan);
  free(p);
  printf("%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
