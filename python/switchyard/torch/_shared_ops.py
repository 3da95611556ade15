# SPDX-License-Identifier: Apache-2.0
"""Experts divided over ranks, as torch operators: `torch.ops.switchyard.shared_…`.

As in _ops.py, all state is in tensors: the plan of a rank, and what a forward keeps for its
backward. `ranks` is the number of a Dispatchers object, which holds the ranks and the placement of
the experts on them. Every operator is collective over these ranks, unless it says otherwise.
"""
import ctypes
import struct
import weakref

import torch

from .._handles import Handle
from .._library import InvalidArgument, checked, library
from ._checks import check_experts, inner_width, require, require_ids, require_tokens
from ._device import check, device_of
from ._ops import (DTYPES, EXPERTS_SCHEMA, contiguous, define, experts_words, fake,
                   gradients_of, pointer, use_up)

for _name in ("dispatcher_host_syncs", "shared_plan_words"):
    getattr(library, f"switchyard_{_name}").restype = ctypes.c_int64
_FORM = struct.Struct("4q")
_MOVED = struct.Struct("7q")
_MOE = struct.Struct("8q3d12q")
_MOE_GRADIENTS = struct.Struct("8q")
_TABLES = ("row_offsets", "group_rows", "overflow", "needed_rows", "needed_tokens", "slots")
_numbered = weakref.WeakValueDictionary()  # the Dispatchers objects of this process
_next_number = 0


def dispatchers_over(link, placement, alignment, sentinels):
    """Returns the Dispatchers of a link for these experts. Similar layers share one: plans are
    tensors, so it holds nothing of a layer, and compilers see a single number."""
    key = placement, alignment, sentinels
    if key not in link.dispatchers:
        link.dispatchers[key] = Dispatchers(link, placement, alignment, sentinels)
    return link.dispatchers[key]


class Dispatchers:
    """The library's dispatchers over some ranks, one per device. All ranks together make one when
    the first tensor on its device comes."""

    def __init__(self, link, placement, alignment, sentinels):
        global _next_number
        self.link = link
        self.placement = placement
        self.alignment = alignment
        self.sentinels = sentinels
        self.num_local_experts = len(placement.experts_of(link.rank))
        self.num_users = 0
        self._words_without_picks = checked(library.switchyard_shared_plan_words(
            placement.pack, *map(ctypes.c_int64, (link.rank, 0, 0))))
        found = (ctypes.c_int64 * len(_TABLES))()
        check(library.switchyard_shared_plan_find_tables(placement.pack, ctypes.c_int64(link.rank),
                                                         found))
        self.tables = dict(zip(_TABLES, found))  # where they begin in a plan, in words
        self._made = {}
        self.number = _next_number
        _next_number += 1
        _numbered[self.number] = self

    def on(self, tensor):
        """Returns (the dispatcher as a Handle, torch's current stream) for a tensor's device."""
        self.link.require_group()
        device, stream = device_of(tensor)
        made = self._made.get(tensor.device)
        if made is None:
            made = self._made[tensor.device] = self._make(device)
        return made, stream

    def _make(self, device):
        dispatcher = ctypes.c_void_p()
        with self.link.communicator._handle as comm:
            check(library.switchyard_dispatcher_make(
                comm, self.placement.pack, ctypes.c_int64(self.alignment),
                ctypes.c_int64(self.sentinels), device, ctypes.byref(dispatcher)))
        return Handle(dispatcher, library.switchyard_dispatcher_free, "dispatcher")

    def plan_words(self, num_tokens, top_k):
        """Returns the length of a plan. Numbers of tokens may be symbolic."""
        return self._words_without_picks + 5 * ((num_tokens * top_k + 3) // 4 * 4)

    def check_plan(self, plan, *form):
        """Raises the same error on all ranks if the plan cannot be used. Waits for a GPU."""
        dispatcher, stream = self.on(plan)
        with dispatcher as handle:
            check(library.switchyard_shared_plan_check(
                handle, stream, _FORM.pack(*form), ctypes.c_void_p(plan.data_ptr())))

    def host_syncs(self):
        total = 0
        for dispatcher in self._made.values():
            with dispatcher as handle:
                total += library.switchyard_dispatcher_host_syncs(handle)
        return total

    def close(self):
        for dispatcher in self._made.values():
            dispatcher.close()


def of_number(number):
    found = _numbered.get(number)
    if found is None:
        raise InvalidArgument(f"there are no ranks {number}: the ExpertParallel no longer exists")
    return found


class Checking:
    """Surrounds checks of this rank's arguments. If one fails, the other ranks are told, so that
    they do not wait for this one."""

    def __init__(self, ranks, operation):
        self._ranks = ranks
        self._operation = operation

    def __enter__(self):
        return self

    def __exit__(self, _kind, error, _trace):
        if error is not None:
            self._ranks.link.communicator._tell(self._operation, error)


def _require_plan(ranks, plan, like, num_tokens, top_k):
    require(plan, "the plan's tensor", (ranks.plan_words(num_tokens, top_k),), like, torch.int32)
    if not plan.is_contiguous():
        raise InvalidArgument("the plan's tensor must be contiguous")


@define("shared_plan", "(Tensor expert_ids, int ranks, int row_capacity, int token_capacity) "
        "-> Tensor")
def _shared_plan(expert_ids, ranks, row_capacity, token_capacity):
    """Returns the plan. A row_capacity of 0 makes it exact; shared_plan_sizes returns its sizes."""
    ranks = of_number(ranks)
    with Checking(ranks, "plan"):
        require_ids(expert_ids)
        ids = expert_ids.contiguous()
        num_tokens, top_k = ids.shape
        plan = ids.new_empty(ranks.plan_words(num_tokens, top_k), dtype=torch.int32)
    dispatcher, stream = ranks.on(ids)
    with dispatcher as handle:
        check(library.switchyard_shared_plan_make(
            handle, stream, _FORM.pack(num_tokens, top_k, row_capacity, token_capacity),
            ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(DTYPES[ids.dtype]),
            ctypes.c_void_p(plan.data_ptr())))
    return plan


@fake("shared_plan")
def _(expert_ids, ranks, row_capacity, token_capacity):
    require_ids(expert_ids)
    return expert_ids.new_empty(of_number(ranks).plan_words(*expert_ids.shape), dtype=torch.int32)


@define("shared_plan_sizes", "(Tensor plan, int ranks, SymInt num_tokens, int top_k) "
        "-> (Tensor, Tensor)")
def _shared_plan_sizes(plan, ranks, num_tokens, top_k):
    """Returns two tensors without elements. Their lengths are the number of rows of an exact plan,
    and the number of tokens that this rank receives. Not collective; waits for a GPU."""
    ranks = of_number(ranks)
    _require_plan(ranks, plan, plan, num_tokens, top_k)
    dispatcher, stream = ranks.on(plan)
    form = (ctypes.c_int64 * 4)(num_tokens, top_k, 0, 0)
    with dispatcher as handle:
        check(library.switchyard_shared_plan_sizes(handle, stream, form,
                                                   ctypes.c_void_p(plan.data_ptr())))
    return plan.new_empty(form[2], 0), plan.new_empty(form[3], 0)


@fake("shared_plan_sizes")
def _(plan, ranks, num_tokens, top_k):
    context = torch.library.get_ctx()
    return (plan.new_empty(context.new_dynamic_size(), 0),
            plan.new_empty(context.new_dynamic_size(), 0))


def _moved(plan, like, num_tokens, top_k, num_rows, num_received):
    return _MOVED.pack(num_tokens, top_k, num_rows, num_received, plan.data_ptr(),
                       DTYPES[like.dtype], like.shape[1])


@define("shared_dispatch", "(Tensor x, Tensor plan, int ranks, int top_k, SymInt num_rows, "
        "SymInt num_received) -> Tensor")
def _shared_dispatch(x, plan, ranks, top_k, num_rows, num_received):
    ranks = of_number(ranks)
    with Checking(ranks, "dispatch"):
        require_tokens(x, "x")
        _require_plan(ranks, plan, x, x.shape[0], top_k)
        x = x.contiguous()
        rows = x.new_empty(num_rows, x.shape[1])
        moved = _moved(plan, x, x.shape[0], top_k, num_rows, num_received)
    dispatcher, stream = ranks.on(x)
    with dispatcher as handle:
        check(library.switchyard_shared_dispatch(
            handle, stream, moved, ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(rows.data_ptr())))
    return rows


@fake("shared_dispatch")
def _(x, plan, ranks, top_k, num_rows, num_received):
    return x.new_empty(num_rows, x.shape[1])


@define("shared_combine", "(Tensor rows, Tensor? pick_weights, Tensor plan, int ranks, int top_k, "
        "SymInt num_tokens, SymInt num_received) -> Tensor")
def _shared_combine(rows, pick_weights, plan, ranks, top_k, num_tokens, num_received):
    ranks = of_number(ranks)
    with Checking(ranks, "combine"):
        require_tokens(rows, "rows")
        _require_plan(ranks, plan, rows, num_tokens, top_k)
        if pick_weights is not None:
            require(pick_weights, "pick_weights", (num_tokens, top_k), rows, torch.float32)
        rows, weights = contiguous(rows, pick_weights)
        y = rows.new_empty(num_tokens, rows.shape[1])
        moved = _moved(plan, rows, num_tokens, top_k, rows.shape[0], num_received)
    dispatcher, stream = ranks.on(rows)
    with dispatcher as handle:
        check(library.switchyard_shared_combine(
            handle, stream, moved, ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(pointer(weights)), ctypes.c_void_p(y.data_ptr())))
    return y


@fake("shared_combine")
def _(rows, pick_weights, plan, ranks, top_k, num_tokens, num_received):
    return rows.new_empty(num_tokens, rows.shape[1])


@define("shared_combine_backward", "(Tensor d_y, Tensor pick_weights, Tensor rows, Tensor plan, "
        "int ranks, SymInt num_received) -> (Tensor, Tensor)")
def _shared_combine_backward(d_y, pick_weights, rows, plan, ranks, num_received):
    ranks = of_number(ranks)
    num_tokens, top_k = pick_weights.shape
    with Checking(ranks, "combine_backward"):
        require_tokens(rows, "rows")
        _require_plan(ranks, plan, rows, num_tokens, top_k)
        require(pick_weights, "pick_weights", (num_tokens, top_k), rows, torch.float32)
        require(d_y, "d_y", (num_tokens, rows.shape[1]), rows)
        d_y, pick_weights, rows = contiguous(d_y, pick_weights, rows)
        d_rows, d_weights = torch.empty_like(rows), torch.empty_like(pick_weights)
        moved = _moved(plan, rows, num_tokens, top_k, rows.shape[0], num_received)
    dispatcher, stream = ranks.on(rows)
    with dispatcher as handle:
        check(library.switchyard_shared_combine_backward(
            handle, stream, moved, ctypes.c_void_p(d_y.data_ptr()),
            ctypes.c_void_p(pick_weights.data_ptr()), ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(d_rows.data_ptr()), ctypes.c_void_p(d_weights.data_ptr())))
    return d_rows, d_weights


@fake("shared_combine_backward")
def _(d_y, pick_weights, rows, plan, ranks, num_received):
    return rows.new_empty(rows.shape), pick_weights.new_empty(pick_weights.shape)


def _check_local_experts(ranks, tokens, name, weights, activation, constants):
    check_experts(tokens, name, *weights, activation, constants)
    if weights[0].shape[0] != ranks.num_local_experts:
        raise InvalidArgument(f"gate_up has {weights[0].shape[0]} experts, but rank "
                              f"{ranks.link.rank} owns {ranks.num_local_experts} of "
                              f"{ranks.placement.num_experts}")


def _moe(form, tokens, plan, weights, activation, constants, x, pick_weights, keep, kept):
    gate_up, down, gate_up_bias, down_bias = weights
    return _MOE.pack(*form, *experts_words(tokens, gate_up, down, activation, constants),
                     gate_up.data_ptr(), down.data_ptr(), pointer(gate_up_bias),
                     pointer(down_bias), plan.data_ptr(), pointer(x), pointer(pick_weights), keep,
                     *(pointer(tensor) for tensor in kept))


@define("shared_moe_forward", "(Tensor x, Tensor pick_weights, Tensor plan, int ranks, "
        f"{EXPERTS_SCHEMA}, SymInt num_rows, SymInt num_received, bool keep) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def _shared_moe_forward(x, pick_weights, plan, ranks, gate_up, down, gate_up_bias, down_bias,
                        activation, constants, num_rows, num_received, keep):
    """Returns y and the tensors that backward needs: the tokens that this rank's experts received,
    their weights, the source of each row among them, and the values between the products."""
    ranks = of_number(ranks)
    weights = (gate_up, down, gate_up_bias, down_bias)
    with Checking(ranks, "forward"):
        _check_local_experts(ranks, x, "x", weights, activation, constants)
        require(pick_weights, "pick_weights", (x.shape[0], pick_weights.shape[1]), x,
                torch.float32)
        num_tokens, top_k = pick_weights.shape
        _require_plan(ranks, plan, x, num_tokens, top_k)
        x, pick_weights, *weights = contiguous(x, pick_weights, *weights)
        y = torch.empty_like(x)
        kept = _kept(x, top_k, num_rows, num_received, inner_width(activation, down.shape[2]),
                     keep)
    dispatcher, stream = ranks.on(x)
    with dispatcher as handle:
        check(library.switchyard_shared_moe_forward(
            handle, stream, _moe((num_tokens, top_k, num_rows, num_received), x, plan, weights,
                                 activation, constants, x, pick_weights, keep, kept),
            ctypes.c_void_p(y.data_ptr())))
    return (y, *kept)


def _kept(x, top_k, num_rows, num_received, width, keep):
    if not keep:
        num_rows, num_received = 0, 0
    return (x.new_empty(num_received, x.shape[1]),
            x.new_empty(num_received, top_k, dtype=torch.float32),
            x.new_empty(num_rows, dtype=torch.int32), x.new_empty(num_rows, width))


@fake("shared_moe_forward")
def _(x, pick_weights, plan, ranks, gate_up, down, gate_up_bias, down_bias, activation, constants,
      num_rows, num_received, keep):
    weights = (gate_up, down, gate_up_bias, down_bias)
    _check_local_experts(of_number(ranks), x, "x", weights, activation, constants)
    return (x.new_empty(x.shape), *_kept(x, pick_weights.shape[1], num_rows, num_received,
                                         inner_width(activation, down.shape[2]), keep))


@define("shared_moe_backward", "(Tensor d_y, Tensor plan, int ranks, Tensor tokens, "
        f"Tensor token_weights, Tensor row_sources, Tensor(a!) inner, {EXPERTS_SCHEMA}, "
        "bool frozen) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
def _shared_moe_backward(d_y, plan, ranks, tokens, token_weights, row_sources, inner, gate_up,
                         down, gate_up_bias, down_bias, activation, constants, frozen):
    ranks = of_number(ranks)
    weights = (gate_up, down, gate_up_bias, down_bias)
    top_k, num_rows = token_weights.shape[1], row_sources.shape[0]
    with Checking(ranks, "backward"):
        _check_local_experts(ranks, d_y, "d_y", weights, activation, constants)
        require(tokens, "tokens", (token_weights.shape[0], d_y.shape[1]), d_y)
        _require_plan(ranks, plan, d_y, d_y.shape[0], top_k)
        recompute = use_up(inner, (num_rows, inner_width(activation, down.shape[2])), d_y)
        d_y, *weights = contiguous(d_y, *weights)
        kept = (*contiguous(tokens, token_weights, row_sources), inner)
        d_x = torch.empty_like(d_y)
        d_pick_weights = d_y.new_empty(d_y.shape[0], top_k, dtype=torch.float32)
        gradients = gradients_of(weights, frozen)
    dispatcher, stream = ranks.on(d_y)
    form = (d_y.shape[0], top_k, num_rows, tokens.shape[0])
    with dispatcher as handle:
        check(library.switchyard_shared_moe_backward(
            handle, stream, _moe(form, d_y, plan, weights, activation, constants, None, None, True,
                                 kept),
            _MOE_GRADIENTS.pack(d_y.data_ptr(), d_x.data_ptr(), d_pick_weights.data_ptr(),
                                *(g.data_ptr() for g in gradients), recompute)))
    return (d_x, d_pick_weights, *gradients)


@fake("shared_moe_backward")
def _(d_y, plan, ranks, tokens, token_weights, row_sources, inner, gate_up, down, gate_up_bias,
      down_bias, activation, constants, frozen):
    weights = (gate_up, down, gate_up_bias, down_bias)
    return (d_y.new_empty(d_y.shape),
            d_y.new_empty(d_y.shape[0], token_weights.shape[1], dtype=torch.float32),
            *gradients_of(weights, frozen))



def _mark_as_ordered():
    """Stops compilers from dropping, repeating or reordering operators that ranks meet in."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    for name in ("plan", "dispatch", "combine", "combine_backward", "moe_forward", "moe_backward"):
        operator = getattr(torch.ops.switchyard, f"shared_{name}").default
        _register_effectful_op(operator, _EffectType.ORDERED)


_mark_as_ordered()
