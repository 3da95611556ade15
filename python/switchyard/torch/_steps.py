"""Training steps over experts of bounded sizing, run again exactly where the bound was too low."""
import contextlib
import itertools
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from .._library import Error, InvalidArgument
from . import _shared_ops
from ._balancer import SavedCounts, group_or_world
from ._ops import define, fake
from ._process_group import link_to

_TIMEOUT = 600.0
_MOST_ROWS = 2**31 - 1
_num_running = 0  # run_step()s of this process; backward, on threads of its own, makes plans, too


class StepResult(NamedTuple):
    """The result of run_step()."""
    value: Any  # what step() returned last
    ran_again: bool


class _Needs(NamedTuple):
    """What the plans of one ExpertParallel asked for in a step."""
    overflow: int = 0  # other than 0 if a rank had no room
    rows: int = 0  # the most that any rank needs
    tokens: int = 0
    minus_lowest_id: int = 0
    highest_id: int = 0


def run_step(experts, step, *, group=None, parameters=None):
    """Runs step(), and again with exact sizing if plans of it had no room, on any rank of `group`
    (default: all ranks). Returns a StepResult. Collective over the group.

    `experts` are ExpertParallel objects, or a module, whose submodules have them as
    `switchyard_experts`. step() is forwards and backwards over any number of layers, repeatable and
    without an optimizer's step, which follows. With room enough it costs one read of device memory
    and a small exchange between hosts.

    Before it runs again, gradients of `parameters` (default: the module's) are what they were, and
    so are the module's buffers, torch's random numbers, and what LoadBalancers have counted: the
    second run is an exact step to the bit. (Gradients that are there before are copied, so it takes
    less memory where they are None.) Then capacities grow to what was needed, and an eighth more.

    Expert ids that are no expert's are an InvalidArgument on every rank. If step() raises, the
    other ranks get a CommunicationError that says so, and experts are of no use any more.
    """
    module = experts if isinstance(experts, torch.nn.Module) else None
    if module is None and parameters is None:
        raise InvalidArgument("parameters is None: without a module, run_step() must be told whose "
                              "gradients to put back")
    layers = _layers_of(experts)
    comm = _communicator(layers, group)
    before = _State(module, list(module.parameters() if parameters is None else parameters))
    try:
        value, needs, overflow = _attempt(layers, step, comm)
        if overflow:
            before.restore()
            with _exact(layers):
                value, needs, overflow_again = _attempt(layers, step, comm)
            _grow(layers, needs, comm)
            if overflow_again:
                raise InvalidArgument(
                    "step() made bounded plans although sizing was exact, as a captured graph does: "
                    "capture it again, with capacities of "
                    f"{[layer.row_capacity for layer in layers]} rows")
    except BaseException:
        with contextlib.suppress(RuntimeError):  # a GPU that is lost: the first error says why
            before.restore()
        raise
    return StepResult(value, overflow)


def _layers_of(experts):
    """Each ExpertParallel once, in the order of the first mention."""
    if isinstance(experts, torch.nn.Module):
        experts = [found for found in (getattr(module, "switchyard_experts", None)
                                       for module in experts.modules()) if found is not None]
    layers = list(dict.fromkeys(experts))
    for layer in layers:
        if not hasattr(layer, "set_capacity"):
            raise InvalidArgument("experts must be ExpertParallel objects or a module, not "
                                  f"{type(layer).__name__}")
    return layers


def _communicator(layers, group):
    """Between the ranks that repeat a step together; None for one that is alone."""
    group = group_or_world(group)
    if group is None or group.size() == 1:
        return None
    timeouts = [layer._dispatchers.link.timeout for layer in layers
                if layer._dispatchers is not None]
    return link_to(group, max(timeouts, default=_TIMEOUT)).communicator


class _State:
    """What a step changes, to be put back."""

    def __init__(self, module, parameters):
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.clone())
                           for p in parameters]
        self._buffers = [(owner, name, buffer, None if buffer is None else buffer.clone())
                         for owner in (() if module is None else module.modules())
                         for name, buffer in owner._buffers.items()]
        self._counts = SavedCounts()
        self._random = torch.get_rng_state()
        devices = {p.device for p in parameters if p.is_cuda}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices.add(torch.device("cuda", torch.cuda.current_device()))
        self._random_of = [(device, torch.cuda.get_rng_state(device)) for device in devices]

    @torch.no_grad()
    def restore(self):
        for parameter, gradient, copy in self._gradients:
            if copy is not None:
                gradient.copy_(copy)  # into the same memory: it may be a view of a bucket
            parameter.grad = gradient
        for owner, name, buffer, copy in self._buffers:
            if copy is not None:
                buffer.copy_(copy)
            owner._buffers[name] = buffer
        self._counts.restore()
        torch.set_rng_state(self._random)
        for device, state in self._random_of:
            torch.cuda.set_rng_state(state, device)


def _attempt(layers, step, comm):
    """(what step() returns, the needs of every layer, whether any rank had no room)."""
    global _num_running
    for layer in layers:
        for words in _words_of(layer._dispatchers).values():
            words.zero_()
    _num_running += 1
    try:
        value = step()
        needs = _read(layers)
    except BaseException as error:
        _give_up(layers, comm, f"run_step: {type(error).__name__}: {error}")
        raise
    finally:
        _num_running -= 1
    bad = next(filter(None, map(_bad_id, layers, needs)), (0, 0))
    told = _gather(comm, [any(own.overflow for own in needs), *bad])
    overflow = any(row[0] for row in told)
    for rank, (_, bad_id, num_experts) in enumerate(told):
        if num_experts > 0 and not overflow:  # exact plans raise by themselves
            raise InvalidArgument(f"rank {rank} of {len(told)} made a plan with expert id {bad_id}, "
                                  f"but there are {num_experts} experts")
    return value, needs, overflow


def _bad_id(layer, own):
    """An id that is no expert's and the number of experts, or None."""
    if own.minus_lowest_id > 1:
        return -own.minus_lowest_id, layer.num_experts
    if own.highest_id >= layer.num_experts and not layer.sentinels:
        return own.highest_id, layer.num_experts
    return None


def _give_up(layers, comm, reason):
    for rank in (*layers, *([] if comm is None else [comm])):
        with contextlib.suppress(Error):  # it has given up before
            rank.abort(reason)


def _gather(comm, numbers):
    """The numbers of every rank."""
    own = np.array([numbers], np.int64)
    return (own if comm is None else np.asarray(comm.all_gather(own))).tolist()


@contextlib.contextmanager
def _exact(layers):
    capacities = [(layer.row_capacity, layer.token_capacity) for layer in layers]
    for layer in layers:
        layer.set_capacity(0)
    try:
        yield
    finally:
        for layer, capacity in zip(layers, capacities):
            layer.set_capacity(*capacity)


def _grow(layers, needs, comm):
    """Ranks of other groups of experts grow along, so that what was seen once is known to all.
    Where they have other layers, as stages of a pipeline do, growing along does no harm."""
    most = max(row[0] for row in _gather(comm, [len(layers)]))
    own = [number for of_layer in needs for number in (of_layer.rows, of_layer.tokens)]
    told = np.array(_gather(comm, own + [0] * (2 * most - len(own)))).max(0).reshape(-1, 2)
    for layer, (rows, tokens) in zip(layers, told.tolist()):
        layer.set_capacity(_grown(layer.row_capacity, rows, layer.alignment),
                           _grown(layer.token_capacity, tokens, 1))


def _grown(capacity, needed, alignment):
    if capacity == 0 or needed <= capacity:  # 0: there is no bound
        return capacity
    return min(needed + needed // 8 + alignment - 1, _MOST_ROWS) // alignment * alignment


# What plans need is collected on their device, in words [3 + 2 · ranks] i64: those of
# SharedPlan.needed, then minus the lowest id, and the highest; 0 at the least.
_noted = weakref.WeakKeyDictionary()  # by Dispatchers: the words, by device


def _words_of(dispatchers):
    return {} if dispatchers is None else _noted.setdefault(dispatchers, {})


@define("note_plan", "(Tensor plan, Tensor expert_ids, int ranks) -> ()")
def _note_plan(plan, expert_ids, ranks):
    """While run_step() runs, adds a plan's needs to those of the step. A graph that is captured
    adds them whenever it is replayed."""
    if _num_running == 0 and not (plan.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    dispatchers = _shared_ops._of(ranks)
    size = dispatchers.link.size
    words = _words_of(dispatchers)
    if plan.device not in words:
        words[plan.device] = plan.new_zeros(3 + 2 * size, dtype=torch.int64)
    tables = dispatchers.tables(0, 1)  # these lie before all that depends on tokens
    found = [plan[tables[name]:tables[name] + 2 * count].view(torch.int64) for name, count in
             (("overflow", 1), ("needed_rows", size), ("needed_tokens", size))]
    if expert_ids.numel() > 0:
        lowest, highest = expert_ids.aminmax()
        found += [-lowest.view(1), highest.view(1)]
    seen = torch.cat(found)
    most = words[plan.device][:len(seen)]
    torch.maximum(most, seen, out=most)


@fake("note_plan")
def _(plan, expert_ids, ranks):
    return None


note_plan = torch.ops.switchyard.note_plan
_register_effectful_op(note_plan.default, _EffectType.ORDERED)


def _read(layers):
    """The _Needs of every layer, with one read of each device's memory."""
    by_device = {}
    for i, layer in enumerate(layers):
        for device, words in _words_of(layer._dispatchers).items():
            by_device.setdefault(device, []).append((i, layer.size, words))
    needs = [_Needs()] * len(layers)
    for noted in by_device.values():
        numbers = iter(torch.cat([words for _, _, words in noted]).tolist())
        for i, size, _ in noted:
            own = [max(itertools.islice(numbers, count)) for count in (1, size, size, 1, 1)]
            needs[i] = _Needs(*map(max, needs[i], own))
    return needs
