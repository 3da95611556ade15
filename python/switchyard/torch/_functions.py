# SPDX-License-Identifier: Apache-2.0
"""The operators with their gradients, as functions of tensors."""
import functools

import torch

from .._activations import DEFAULT_CONSTANTS, Activation
from .._library import InvalidArgument
from . import _ops
from ._checks import most_rows


class Plan:
    """The destination of every pick of a token, all of it in `tensor` [n] i32.

    The plan of T tokens with K picks of E experts has a row for every pick, ordered by expert and
    then by (token, k). Each expert's rows begin at a multiple of `alignment`.
    """

    def __init__(self, tensor, num_tokens, top_k, num_experts, alignment=1):
        self.tensor = tensor
        self.num_tokens = num_tokens
        self.top_k = top_k
        self.num_experts = num_experts
        self.alignment = alignment
        self._exact_rows = None  # known once somebody has waited for it

    @property
    def most_rows(self):
        """The number of rows that is enough for any routing."""
        return most_rows(*self._form())

    def num_rows(self):
        """Returns the number of rows that the experts use, including padding. Waits for a GPU."""
        self._exact_rows = _ops.plan_num_rows(self.tensor, *self._form())
        return self._exact_rows

    def check(self):
        """Raises InvalidArgument if the plan was made from bad ids. Waits for a GPU; on a CPU,
        plan() itself has raised."""
        _ops.plan_check(self.tensor, *self._form())

    @property
    def slots(self):
        """[T, K] i32: the row of every pick, or −1 if there is none."""
        return self._table(0, self.num_tokens * self.top_k).view(self.num_tokens, self.top_k)

    @property
    def row_offsets(self):
        """[E + 1] i32: where the rows of each expert begin."""
        return self._table(1, self.num_experts + 1)

    @property
    def group_rows(self):
        """[E] i32: the number of rows of each expert, without padding."""
        return self._table(2, self.num_experts)

    @property
    def row_sources(self):
        """[most_rows] i32: the pick t·K + k of each row; undefined for padding."""
        return self._table(3, self.most_rows)

    def _form(self):
        return self.num_tokens, self.top_k, self.num_experts, self.alignment

    def _table(self, index, size):
        first = _ops.plan_tables(*self._form())[index]
        return self.tensor[first:first + size]


def plan(expert_ids, num_experts, *, alignment=1, sentinels=False):
    """Makes a Plan for expert_ids [T, K], i32 or i64; −1 is no pick.

    With `sentinels`, ids of `num_experts` and above are no pick either. Otherwise they are an
    error, which on a GPU, where nothing waits, only Plan.check() reports.
    """
    tensor = torch.ops.switchyard.plan(expert_ids, num_experts, alignment, sentinels)
    return Plan(tensor, expert_ids.shape[0], expert_ids.shape[1], num_experts, alignment)


def needs_gradient(*tensors):
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _NoSecondDerivative(torch.autograd.Function):
    """Passes the first `count` tensors through, as functions of all tensors whose backward
    raises."""

    @staticmethod
    def forward(_ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(_ctx, *_gradients):
        raise RuntimeError("Switchyard's gradients cannot be differentiated again: there are no "
                           "second derivatives of its plan, experts, movement and router")


def first_order(backward):
    """Decorates a backward function so that differentiating its results raises an error."""

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return results
        given = [r for r in results if r is not None]
        inputs = [t for t in (*ctx.saved_tensors, *gradients) if t is not None]
        passed = iter(_NoSecondDerivative.apply(len(given), *given, *inputs))
        return tuple(None if r is None else next(passed) for r in results)

    return wrapper


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan_tensor, top_k, num_experts, alignment, num_rows):
        ctx.save_for_backward(plan_tensor)
        ctx.form = (top_k, num_experts, alignment)
        ctx.num_tokens = x.shape[0]
        return torch.ops.switchyard.dispatch(x, plan_tensor, *ctx.form, num_rows)

    @staticmethod
    @first_order
    def backward(ctx, d_rows):
        plan_tensor, = ctx.saved_tensors
        d_x = torch.ops.switchyard.combine(d_rows, None, plan_tensor, *ctx.form, ctx.num_tokens)
        return d_x, None, None, None, None, None


def _num_rows(plan, exact):
    """Returns the rows that buffers need: enough for any routing, or the plan's own number."""
    if not exact:
        return plan.most_rows
    sources = torch.ops.switchyard.row_sources(plan.tensor, plan.top_k, plan.num_experts,
                                               plan.alignment, plan.num_tokens)
    plan._exact_rows = sources.shape[0]
    return plan._exact_rows


def dispatch(plan, x, *, exact=False):
    """Returns rows [R, H] of tokens x [T, H]: row slots[t, k] is x[t], and padding is 0.

    R is plan.most_rows, and nothing waits; with `exact` it is plan.num_rows(), which waits for a
    GPU once. Rows beyond those of the plan are undefined.
    """
    _check_tokens(plan, x, "x")
    return _Dispatch.apply(x, plan.tensor, plan.top_k, plan.num_experts, plan.alignment,
                           _num_rows(plan, exact))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, pick_weights, plan_tensor, top_k, num_experts, alignment, num_tokens):
        ctx.save_for_backward(rows, pick_weights, plan_tensor)
        ctx.form = (top_k, num_experts, alignment)
        return torch.ops.switchyard.combine(rows, pick_weights, plan_tensor, *ctx.form, num_tokens)

    @staticmethod
    @first_order
    def backward(ctx, d_y):
        rows, pick_weights, plan_tensor = ctx.saved_tensors
        d_rows, d_weights = torch.ops.switchyard.combine_backward(d_y, pick_weights, rows,
                                                                  plan_tensor, *ctx.form)
        return d_rows, d_weights, None, None, None, None, None


def combine(plan, rows, pick_weights):
    """Returns y [T, H]: y[t] = Σ_k pick_weights[t, k] · rows[slots[t, k]], in f32, k in order.

    rows are [R, H] as returned by dispatch(), and pick_weights are [T, K].
    """
    _check_rows(plan, rows)
    _check_picks(plan, pick_weights)
    return _Combine.apply(rows, pick_weights.float(), plan.tensor, plan.top_k, plan.num_experts,
                          plan.alignment, plan.num_tokens)


class _Experts(torch.autograd.Function):
    """Backward consumes the values between an expert's products; a second one recomputes them."""

    @staticmethod
    def forward(ctx, rows, gate_up, down, gate_up_bias, down_bias, plan_tensor, num_tokens, top_k,
                alignment, activation, constants, keep):
        ctx.form = (num_tokens, top_k, alignment)
        ctx.activation = (activation, constants)
        out, inner = torch.ops.switchyard.experts_forward(
            rows, plan_tensor, *ctx.form, gate_up, down, gate_up_bias, down_bias, activation,
            constants, keep)
        ctx.save_for_backward(rows, gate_up, down, gate_up_bias, down_bias, plan_tensor, inner)
        return out

    @staticmethod
    @first_order
    def backward(ctx, d_out):
        rows, gate_up, down, gate_up_bias, down_bias, plan_tensor, inner = ctx.saved_tensors
        frozen = not any(ctx.needs_input_grad[1:5])
        d_rows, *gradients = torch.ops.switchyard.experts_backward(
            d_out, rows, plan_tensor, *ctx.form, gate_up, down, gate_up_bias, down_bias,
            *ctx.activation, inner, frozen)
        return (d_rows, *wanted(gradients, ctx.needs_input_grad[1:5])) + (None,) * 7


def wanted(gradients, needed):
    return tuple(g if n else None for g, n in zip(gradients, needed))


def experts(plan, rows, gate_up, down, gate_up_bias=None, down_bias=None, *,
            activation=Activation.SWIGLU, constants=DEFAULT_CONSTANTS):
    """Applies each expert's two products to its rows [R, H], and returns [R, H].

    gate_up is [E, 2I, H] with the gates first ([E, I, H] without gates), and down is [E, H, I].
    Biases are [E, 2I] and [E, H].
    """
    weights = (gate_up, down, gate_up_bias, down_bias)
    _check_rows(plan, rows)
    _check_num_experts(plan, gate_up)
    return _Experts.apply(rows, *weights, plan.tensor, plan.num_tokens, plan.top_k, plan.alignment,
                          int(activation), list(map(float, constants)),
                          needs_gradient(rows, *weights))


class _Moe(torch.autograd.Function):
    """Like _Experts, with the movement to the experts and back."""

    @staticmethod
    def forward(ctx, x, pick_weights, gate_up, down, gate_up_bias, down_bias, plan_tensor,
                alignment, activation, constants, num_rows, keep):
        ctx.alignment = alignment
        ctx.activation = (activation, constants)
        y, inner = torch.ops.switchyard.moe_forward(
            x, pick_weights, plan_tensor, alignment, gate_up, down, gate_up_bias, down_bias,
            activation, constants, num_rows, keep)
        ctx.save_for_backward(x, pick_weights, gate_up, down, gate_up_bias, down_bias, plan_tensor,
                              inner)
        return y

    @staticmethod
    @first_order
    def backward(ctx, d_y):
        (x, pick_weights, gate_up, down, gate_up_bias, down_bias, plan_tensor,
         inner) = ctx.saved_tensors
        frozen = not any(ctx.needs_input_grad[2:6])
        results = torch.ops.switchyard.moe_backward(
            d_y, x, pick_weights, plan_tensor, ctx.alignment, gate_up, down, gate_up_bias,
            down_bias, *ctx.activation, inner, frozen)
        return wanted(results, ctx.needs_input_grad[:6]) + (None,) * 6


def _check_tokens(plan, x, name):
    if x.dim() != 2 or x.shape[0] != plan.num_tokens:
        raise InvalidArgument(f"{name} is {list(x.shape)}, but the plan has {plan.num_tokens} "
                              "tokens: it must be [T,H]")


def _check_num_experts(plan, gate_up):
    if gate_up.shape[0] != plan.num_experts:
        raise InvalidArgument(f"gate_up has {gate_up.shape[0]} experts, but the plan "
                              f"has {plan.num_experts}")


def _check_rows(plan, rows):
    """Checks the number of rows, which kernels do not know: they would overrun a shorter buffer."""
    if rows.dim() != 2 or rows.shape[0] not in (plan.most_rows, plan._exact_rows):
        raise InvalidArgument(f"rows are {list(rows.shape)}, but must be as many as the plan's "
                              f"most_rows ({plan.most_rows}), or its num_rows() if that was called")


def _check_picks(plan, pick_weights):
    if tuple(pick_weights.shape) != (plan.num_tokens, plan.top_k):
        raise InvalidArgument(f"pick_weights is {list(pick_weights.shape)}, but the plan has picks "
                              f"[{plan.num_tokens},{plan.top_k}]")


def moe(plan, x, pick_weights, gate_up, down, gate_up_bias=None, down_bias=None, *,
        activation=Activation.SWIGLU, constants=DEFAULT_CONSTANTS, exact=False):
    """Runs tokens x [T, H] through their experts and combines the results; [T, H].

    y[t] = Σ_k pick_weights[t, k] · expert(x[t]), summed in f32. Weights are as in experts(), and x
    has their dtype. For backward it keeps x, and the values between the products of every row. No
    call waits for a GPU, except that `exact` makes forward wait once for the number of rows, which
    saves memory where many ids are no pick.
    """
    _check_tokens(plan, x, "x")
    _check_picks(plan, pick_weights)
    _check_num_experts(plan, gate_up)
    weights = (gate_up, down, gate_up_bias, down_bias)
    return _Moe.apply(x, pick_weights.float(), *weights, plan.tensor, plan.alignment,
                      int(activation), list(map(float, constants)), _num_rows(plan, exact),
                      needs_gradient(x, pick_weights, *weights))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, gate_bias, score_bias, *form):
        ids, weights, non_finite = torch.ops.switchyard.route(x, gate, gate_bias, score_bias, *form)
        ctx.save_for_backward(x, gate, gate_bias, score_bias, ids)
        ctx.form = form
        ctx.mark_non_differentiable(ids, non_finite)
        return ids, weights, non_finite

    @staticmethod
    @first_order
    def backward(ctx, _d_ids, d_weights, _d_non_finite):
        x, gate, gate_bias, score_bias, ids = ctx.saved_tensors
        d_x, d_gate, d_gate_bias = torch.ops.switchyard.route_backward(
            d_weights, ids, x, gate, gate_bias, score_bias, *ctx.form)
        d_bias = None if gate_bias is None else d_gate_bias.to(gate_bias.dtype)
        return (d_x, d_gate.to(gate.dtype), d_bias, None) + (None,) * len(ctx.form)


def route(x, gate, top_k, *, gate_bias=None, score_bias=None, score="softmax", bias_enters="choice",
          normalise=True, scale=1.0, num_expert_groups=1, kept_expert_groups=1):
    """Chooses the top_k experts of every token x [T, H] and their weights. Returns (ids [T, K] i32,
    weights [T, K] f32, first_non_finite [1] i64).

    gate is [E, H], gate_bias [E]. `score` is "softmax" or "sigmoid". score_bias [E] f32 is added to
    the scores that are compared ("choice", as in DeepSeek-V3) or to the logits ("logits"). With
    `normalise`, a token's weights add up to `scale`. A token whose logits are not finite gets no
    picks; first_non_finite is the first such token, or −1.
    """
    if score not in ("softmax", "sigmoid"):
        raise InvalidArgument(f"score is {score!r}, but must be 'softmax' or 'sigmoid'")
    if bias_enters not in ("choice", "logits"):
        raise InvalidArgument(f"bias_enters is {bias_enters!r}, but must be 'choice' or 'logits'")
    kind = 0 if score_bias is None else 1 if bias_enters == "choice" else 2
    return _Route.apply(x, gate, gate_bias, score_bias, top_k, score == "sigmoid", kind, normalise,
                        float(scale), num_expert_groups, kept_expert_groups)
