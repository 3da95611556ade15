# SPDX-License-Identifier: Apache-2.0
"""The library's functions as torch operators: `torch.ops.switchyard.…`.

Every operator takes and returns only tensors. A plan is one i32 tensor, so activation
checkpointing, torch.compile and CUDA graphs treat it like any other.
"""
import ctypes
import struct

import torch

from .._library import InvalidArgument, library
from ._checks import (check_experts, check_moe, check_router, inner_width, plan_words,
                      require, require_ids, require_plan, require_tokens)
from ._device import check, device_of

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2, torch.int64: 3}
_FORM = struct.Struct("5q")
_MOVED = struct.Struct("9q")
_ROWS = struct.Struct("9q3d8q")
_MOE = struct.Struct("9q3d9q")
_MOE_GRADIENTS = struct.Struct("8q")
EXPERTS = struct.Struct("4q")
_ROUTER = struct.Struct("5qd10q")
_ROUTER_GRADIENTS = struct.Struct("5q")


def pointer(tensor):
    return 0 if tensor is None else tensor.data_ptr()


_ops = torch.library.Library("switchyard", "DEF")
EXPERTS_SCHEMA = ("Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
                   "int activation, float[] constants")
_PLAN_SCHEMA = "Tensor plan, int top_k, int num_experts, int alignment"


def define(name, schema, tags=()):
    """Registers a function as an operator for CPUs and GPUs."""
    _ops.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order, *tags))

    def register(function):
        for key in ("CPU", "CUDA"):
            _ops.impl(name, function, key)
        return function

    return register


def fake(name):
    return torch.library.register_fake(f"switchyard::{name}", lib=_ops)


def _plan_of(num_tokens, top_k, num_experts, alignment, sentinels=False):
    return _FORM.pack(num_tokens, top_k, num_experts, alignment, sentinels)


@define("plan", "(Tensor expert_ids, int num_experts, int alignment, bool sentinels) -> Tensor")
def _plan(expert_ids, num_experts, alignment, sentinels):
    require_ids(expert_ids)
    ids = expert_ids.contiguous()
    num_tokens, top_k = ids.shape
    plan = ids.new_empty(plan_words(num_tokens, top_k, num_experts, alignment), dtype=torch.int32)
    device, stream = device_of(ids)
    check(library.switchyard_plan_make(
        device, stream, _plan_of(num_tokens, top_k, num_experts, alignment, sentinels),
        ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(DTYPES[ids.dtype]),
        ctypes.c_void_p(plan.data_ptr())))
    return plan


@fake("plan")
def _(expert_ids, num_experts, alignment, sentinels):
    require_ids(expert_ids)
    words = plan_words(expert_ids.shape[0], expert_ids.shape[1], num_experts, alignment)
    return expert_ids.new_empty(words, dtype=torch.int32)


def plan_num_rows(plan, num_tokens, top_k, num_experts, alignment):
    """Returns the number of rows that the experts use, including padding. Waits for a GPU."""
    require_plan(plan, plan, num_tokens, top_k, num_experts, alignment)
    device, stream = device_of(plan)
    rows = ctypes.c_int64()
    check(library.switchyard_plan_num_rows(
        device, stream, _plan_of(num_tokens, top_k, num_experts, alignment),
        ctypes.c_void_p(plan.data_ptr()), ctypes.byref(rows)))
    return rows.value


def plan_check(plan, num_tokens, top_k, num_experts, alignment):
    """Raises InvalidArgument if the plan was made from bad ids. Waits for a GPU."""
    require_plan(plan, plan, num_tokens, top_k, num_experts, alignment)
    device, stream = device_of(plan)
    check(library.switchyard_plan_check(
        device, stream, _plan_of(num_tokens, top_k, num_experts, alignment),
        ctypes.c_void_p(plan.data_ptr())))


def plan_tables(num_tokens, top_k, num_experts, alignment):
    """Returns where the tables begin in a plan: slots, row offsets, group rows and row sources."""
    tables = (ctypes.c_int64 * 4)()
    check(library.switchyard_plan_find_tables(
        _plan_of(num_tokens, top_k, num_experts, alignment), ctypes.byref(tables)))
    return tuple(tables)


@define("row_sources", f"({_PLAN_SCHEMA}, SymInt num_tokens) -> Tensor")
def _row_sources(plan, top_k, num_experts, alignment, num_tokens):
    """Returns [R] i32 for the R rows that the experts use. With exact sizes, all others follow from
    this one. Waits for a GPU."""
    form = (num_tokens, top_k, num_experts, alignment)
    first = plan_tables(*form)[3]
    return plan[first:first + plan_num_rows(plan, *form)].clone()


@fake("row_sources")
def _(plan, top_k, num_experts, alignment, num_tokens):
    return plan.new_empty(torch.library.get_ctx().new_dynamic_size())


def _moved(plan, like, num_tokens, num_rows, top_k, num_experts, alignment):
    require_plan(plan, like, num_tokens, top_k, num_experts, alignment)
    return _MOVED.pack(num_tokens, top_k, num_experts, alignment, 0, plan.data_ptr(),
                       DTYPES[like.dtype], like.shape[1], num_rows)


@define("dispatch", f"(Tensor x, {_PLAN_SCHEMA}, SymInt num_rows) -> Tensor")
def _dispatch(x, plan, top_k, num_experts, alignment, num_rows):
    require_tokens(x, "x")
    x = x.contiguous()
    moved = _moved(plan, x, x.shape[0], num_rows, top_k, num_experts, alignment)
    rows = x.new_empty(num_rows, x.shape[1])
    device, stream = device_of(x)
    check(library.switchyard_dispatch(
        device, stream, moved,
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(rows.data_ptr())))
    return rows


@fake("dispatch")
def _(x, plan, top_k, num_experts, alignment, num_rows):
    return x.new_empty(num_rows, x.shape[1])


@define("combine", f"(Tensor rows, Tensor? pick_weights, {_PLAN_SCHEMA}, SymInt num_tokens) "
         "-> Tensor")
def _combine(rows, pick_weights, plan, top_k, num_experts, alignment, num_tokens):
    require_tokens(rows, "rows")
    if pick_weights is not None:
        require(pick_weights, "pick_weights", (num_tokens, top_k), rows, torch.float32)
    rows, weights = contiguous(rows, pick_weights)
    moved = _moved(plan, rows, num_tokens, rows.shape[0], top_k, num_experts, alignment)
    y = rows.new_empty(num_tokens, rows.shape[1])
    device, stream = device_of(rows)
    check(library.switchyard_combine(
        device, stream, moved,
        ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(pointer(weights)),
        ctypes.c_void_p(y.data_ptr())))
    return y


@fake("combine")
def _(rows, pick_weights, plan, top_k, num_experts, alignment, num_tokens):
    return rows.new_empty(num_tokens, rows.shape[1])


@define("combine_backward", f"(Tensor d_y, Tensor pick_weights, Tensor rows, {_PLAN_SCHEMA}) "
         "-> (Tensor, Tensor)")
def _combine_backward(d_y, pick_weights, rows, plan, top_k, num_experts, alignment):
    require_tokens(rows, "rows")
    num_tokens = pick_weights.shape[0]
    require(pick_weights, "pick_weights", (num_tokens, top_k), rows, torch.float32)
    require(d_y, "d_y", (num_tokens, rows.shape[1]), rows)
    d_y, pick_weights, rows = contiguous(d_y, pick_weights, rows)
    moved = _moved(plan, rows, num_tokens, rows.shape[0], top_k, num_experts, alignment)
    d_rows = torch.empty_like(rows)
    d_weights = torch.empty_like(pick_weights)
    device, stream = device_of(d_y)
    check(library.switchyard_combine_backward(
        device, stream, moved,
        ctypes.c_void_p(d_y.data_ptr()), ctypes.c_void_p(pick_weights.data_ptr()),
        ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(d_rows.data_ptr()),
        ctypes.c_void_p(d_weights.data_ptr())))
    return d_rows, d_weights


@fake("combine_backward")
def _(d_y, pick_weights, rows, plan, top_k, num_experts, alignment):
    return (torch.empty_like(rows, memory_format=torch.contiguous_format),
            torch.empty_like(pick_weights, memory_format=torch.contiguous_format))


def experts_words(tokens, gate_up, down, activation, constants):
    return (tokens.shape[1], down.shape[2], DTYPES[tokens.dtype], activation, *constants)


def contiguous(*tensors):
    return tuple(None if t is None else t.contiguous() for t in tensors)


def _moe_words(x, pick_weights, plan, alignment, weights, activation, constants, num_rows, inner):
    gate_up, down, gate_up_bias, down_bias = weights
    return _MOE.pack(*pick_weights.shape, gate_up.shape[0], alignment, 0,
                     *experts_words(x, gate_up, down, activation, constants),
                     gate_up.data_ptr(), down.data_ptr(), pointer(gate_up_bias),
                     pointer(down_bias), plan.data_ptr(), num_rows, x.data_ptr(),
                     pick_weights.data_ptr(), pointer(inner))


@define("moe_forward", "(Tensor x, Tensor pick_weights, Tensor plan, int alignment, "
         f"{EXPERTS_SCHEMA}, SymInt num_rows, bool keep) -> (Tensor, Tensor)")
def _moe_forward(x, pick_weights, plan, alignment, gate_up, down, gate_up_bias, down_bias,
                 activation, constants, num_rows, keep):
    weights = (gate_up, down, gate_up_bias, down_bias)
    check_moe(x, pick_weights, plan, alignment, weights, activation, constants)
    x, pick_weights, *weights = contiguous(x, pick_weights, *weights)
    y = torch.empty_like(x)
    inner = x.new_empty(num_rows if keep else 0, inner_width(activation, down.shape[2]))
    device, stream = device_of(x)
    check(library.switchyard_moe_forward(
        device, stream, _moe_words(x, pick_weights, plan, alignment, weights, activation,
                                   constants, num_rows, inner if keep and num_rows else None),
        ctypes.c_void_p(y.data_ptr())))
    return y, inner


@fake("moe_forward")
def _(x, pick_weights, plan, alignment, gate_up, down, gate_up_bias, down_bias, activation,
      constants, num_rows, keep):
    check_experts(x, "x", gate_up, down, gate_up_bias, down_bias, activation, constants)
    width = inner_width(activation, down.shape[2])
    return x.new_empty(x.shape), x.new_empty(num_rows if keep else 0, width)


@define("moe_backward", "(Tensor d_y, Tensor x, Tensor pick_weights, Tensor plan, int alignment, "
         f"{EXPERTS_SCHEMA}, Tensor(a!) inner, bool frozen) "
         "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _moe_backward(d_y, x, pick_weights, plan, alignment, gate_up, down, gate_up_bias, down_bias,
                  activation, constants, inner, frozen):
    weights = (gate_up, down, gate_up_bias, down_bias)
    check_moe(x, pick_weights, plan, alignment, weights, activation, constants)
    require(d_y, "d_y", x.shape, x)
    recompute = use_up(inner, (inner.shape[0], inner_width(activation, down.shape[2])), x)
    d_y, x, pick_weights, *weights = contiguous(d_y, x, pick_weights, *weights)
    d_x = torch.empty_like(x)
    d_pick_weights = torch.empty_like(pick_weights)
    gradients = gradients_of(weights, frozen)
    device, stream = device_of(x)
    check(library.switchyard_moe_backward(
        device, stream,
        _moe_words(x, pick_weights, plan, alignment, weights, activation, constants,
                   inner.shape[0], inner if inner.shape[0] else None),
        _MOE_GRADIENTS.pack(d_y.data_ptr(), d_x.data_ptr(), d_pick_weights.data_ptr(),
                            *(g.data_ptr() for g in gradients), recompute)))
    return (d_x, d_pick_weights, *gradients)


def use_up(inner, shape, like):
    """Marks `inner` as consumed. Returns whether an earlier backward had consumed it, in which case
    it must be recomputed.

    Traced calls cannot tell which of them comes second, so the tensor itself remembers.
    """
    require(inner, "inner", shape, like)
    if not inner.is_contiguous():
        raise InvalidArgument("inner must be contiguous")
    is_used_up = getattr(inner, "_switchyard_used_up", False)
    inner._switchyard_used_up = True
    return is_used_up


def gradients_of(weights, frozen):
    """Allocates the gradients of weights; empty tensors where there are none."""
    like = weights[0]
    return [like.new_empty(0) if frozen or w is None else
            torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights]


@fake("moe_backward")
def _(d_y, x, pick_weights, plan, alignment, gate_up, down, gate_up_bias, down_bias, activation,
      constants, inner, frozen):
    return (x.new_empty(x.shape), pick_weights.new_empty(pick_weights.shape),
            *gradients_of((gate_up, down, gate_up_bias, down_bias), frozen))


def _rows_words(rows, plan, num_tokens, top_k, alignment, weights, activation, constants, inner):
    gate_up, down, gate_up_bias, down_bias = weights
    return _ROWS.pack(num_tokens, top_k, gate_up.shape[0], alignment, 0,
                      *experts_words(rows, gate_up, down, activation, constants),
                      gate_up.data_ptr(), down.data_ptr(), pointer(gate_up_bias),
                      pointer(down_bias), plan.data_ptr(), rows.shape[0], rows.data_ptr(),
                      pointer(inner))


@define("experts_forward", "(Tensor rows, Tensor plan, SymInt num_tokens, int top_k, int alignment, "
         f"{EXPERTS_SCHEMA}, bool keep) -> (Tensor, Tensor)")
def _experts_forward(rows, plan, num_tokens, top_k, alignment, gate_up, down, gate_up_bias,
                     down_bias, activation, constants, keep):
    weights = (gate_up, down, gate_up_bias, down_bias)
    check_experts(rows, "rows", *weights, activation, constants)
    require_plan(plan, rows, num_tokens, top_k, gate_up.shape[0], alignment)
    rows, *weights = contiguous(rows, *weights)
    out = torch.zeros_like(rows)  # zeros for padding and unused rows
    inner = rows.new_empty(rows.shape[0] if keep else 0, inner_width(activation, down.shape[2]))
    device, stream = device_of(rows)
    check(library.switchyard_rows_forward(
        device, stream, _rows_words(rows, plan, num_tokens, top_k, alignment, weights, activation,
                                    constants, inner if keep else None),
        ctypes.c_void_p(out.data_ptr())))
    return out, inner


@fake("experts_forward")
def _(rows, plan, num_tokens, top_k, alignment, gate_up, down, gate_up_bias, down_bias, activation,
      constants, keep):
    check_experts(rows, "rows", gate_up, down, gate_up_bias, down_bias, activation, constants)
    width = inner_width(activation, down.shape[2])
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[0] if keep else 0, width)


@define("experts_backward", "(Tensor d_out, Tensor rows, Tensor plan, SymInt num_tokens, int top_k, "
         f"int alignment, {EXPERTS_SCHEMA}, Tensor(a!) inner, bool frozen) "
         "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _experts_backward(d_out, rows, plan, num_tokens, top_k, alignment, gate_up, down, gate_up_bias,
                      down_bias, activation, constants, inner, frozen):
    weights = (gate_up, down, gate_up_bias, down_bias)
    check_experts(rows, "rows", *weights, activation, constants)
    require_plan(plan, rows, num_tokens, top_k, gate_up.shape[0], alignment)
    require(d_out, "d_out", rows.shape, rows)
    recompute = use_up(inner, (rows.shape[0], inner_width(activation, down.shape[2])), rows)
    d_out, rows, *weights = contiguous(d_out, rows, *weights)
    d_rows = torch.zeros_like(rows)
    gradients = gradients_of(weights, frozen)
    device, stream = device_of(rows)
    check(library.switchyard_rows_backward(
        device, stream, _rows_words(rows, plan, num_tokens, top_k, alignment, weights, activation,
                                    constants, inner),
        ctypes.c_void_p(d_out.data_ptr()), ctypes.c_void_p(d_rows.data_ptr()),
        EXPERTS.pack(*(g.data_ptr() for g in gradients)), ctypes.c_int64(recompute)))
    return (d_rows, *gradients)


@fake("experts_backward")
def _(d_out, rows, plan, num_tokens, top_k, alignment, gate_up, down, gate_up_bias, down_bias,
      activation, constants, inner, frozen):
    return (rows.new_empty(rows.shape),
            *gradients_of((gate_up, down, gate_up_bias, down_bias), frozen))


_ROUTER_SCHEMA = ("Tensor x, Tensor gate, Tensor? gate_bias, Tensor? score_bias, int top_k, "
                  "bool sigmoid, int score_bias_kind, bool normalise, float scale, "
                  "int num_expert_groups, int kept_expert_groups")


def _router_words(x, gate, gate_bias, score_bias, top_k, sigmoid, score_bias_kind, normalise, scale,
                  num_expert_groups, kept_expert_groups):
    return _ROUTER.pack(gate.shape[0], top_k, sigmoid, score_bias_kind, normalise, scale,
                        num_expert_groups, kept_expert_groups, x.shape[0], x.shape[1],
                        DTYPES[x.dtype], DTYPES[gate.dtype], x.data_ptr(), gate.data_ptr(),
                        pointer(gate_bias), pointer(score_bias))


@define("route", f"({_ROUTER_SCHEMA}) -> (Tensor, Tensor, Tensor)")
def _route(x, gate, gate_bias, score_bias, top_k, *form):
    check_router(x, gate, gate_bias, score_bias)
    x, gate, gate_bias, score_bias = contiguous(x, gate, gate_bias, score_bias)
    ids = x.new_empty(x.shape[0], top_k, dtype=torch.int32)
    weights = x.new_empty(x.shape[0], top_k, dtype=torch.float32)
    non_finite = x.new_empty(1, dtype=torch.int64)
    device, stream = device_of(x)
    check(library.switchyard_route(
        device, stream, _router_words(x, gate, gate_bias, score_bias, top_k, *form),
        ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p(weights.data_ptr()),
        ctypes.c_void_p(non_finite.data_ptr())))
    return ids, weights, non_finite


@fake("route")
def _(x, gate, gate_bias, score_bias, top_k, *form):
    return (x.new_empty(x.shape[0], top_k, dtype=torch.int32),
            x.new_empty(x.shape[0], top_k, dtype=torch.float32),
            x.new_empty(1, dtype=torch.int64))


@define("route_backward", f"(Tensor d_pick_weights, Tensor expert_ids, {_ROUTER_SCHEMA}) "
         "-> (Tensor, Tensor, Tensor)")
def _route_backward(d_pick_weights, expert_ids, x, gate, gate_bias, score_bias, top_k, *form):
    check_router(x, gate, gate_bias, score_bias)
    require(d_pick_weights, "d_pick_weights", (x.shape[0], top_k), x, torch.float32)
    require(expert_ids, "expert_ids", (x.shape[0], top_k), x, torch.int32)
    d_pick_weights, expert_ids, x, gate, gate_bias, score_bias = contiguous(
        d_pick_weights, expert_ids, x, gate, gate_bias, score_bias)
    d_x = torch.empty_like(x)
    d_gate = torch.empty_like(gate, dtype=torch.float32)
    d_gate_bias = gate.new_empty(0 if gate_bias is None else gate.shape[0], dtype=torch.float32)
    device, stream = device_of(x)
    check(library.switchyard_route_backward(
        device, stream, _router_words(x, gate, gate_bias, score_bias, top_k, *form),
        _ROUTER_GRADIENTS.pack(expert_ids.data_ptr(), d_pick_weights.data_ptr(), d_x.data_ptr(),
                               d_gate.data_ptr(), d_gate_bias.data_ptr())))
    return d_x, d_gate, d_gate_bias


@fake("route_backward")
def _(d_pick_weights, expert_ids, x, gate, gate_bias, score_bias, top_k, *form):
    return (x.new_empty(x.shape), gate.new_empty(gate.shape, dtype=torch.float32),
            gate.new_empty(0 if gate_bias is None else gate.shape[0], dtype=torch.float32))
