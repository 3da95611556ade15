# SPDX-License-Identifier: Apache-2.0
"""Training steps with bounded sizing, which are run again with exact sizing after an overflow."""
import contextlib
import itertools
import os
import weakref
from typing import Any, NamedTuple

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from .._library import CommunicationError, Error, InvalidArgument, check
from . import _shared_ops
from ._balancer import SavedCounts, group_or_world
from ._ops import define, fake
from ._process_group import Link

_MOST_ROWS = 2**31 - 1
_NUM_VOTES = 3  # a rank's votes after a step: had no room, a bad id, its number of experts
_num_running = 0  # run_step() calls in progress; global, since backward's threads make plans, too


class StepResult(NamedTuple):
    """The result of run_step()."""
    value: Any  # the last result of step()
    ran_again: bool


class _Needs(NamedTuple):
    """The needs of one ExpertParallel's plans in a step."""
    overflow: int = 0  # nonzero if a rank had no room
    rows: int = 0  # the most that any rank needs
    tokens: int = 0
    minus_lowest_id: int = 0
    highest_id: int = 0


def run_step(experts, step, *, group=None, parameters=None, timeout=600.0):
    """Runs step(), and runs it again with exact sizing if its plans had no room on any rank of
    `group` (default: all ranks). Returns a StepResult. Collective over the group.

    `experts` are the ExpertParallel objects that step() uses, or a module whose submodules have
    them as `switchyard_experts`. step() runs forwards and backwards over any number of layers. It
    must be repeatable, and leave the optimizer's step to the caller. Without an overflow, this
    costs one read of device memory and a small exchange between hosts, which wait up to `timeout`
    seconds for each other.

    Before step() runs again, the gradients of `parameters` (default: the module's), the module's
    buffers, torch's random state and the counts of LoadBalancers are restored, so that the second
    run is an exact step to the bit. Then capacities grow to what was needed plus an eighth.
    Gradients are copied for that: set them to None before a step if memory is short.

    Invalid expert ids are an error on every rank, an InvalidArgument unless the step had to run
    again. If step() raises on one rank, the others raise a CommunicationError that quotes it, and
    the experts are unusable from then on. After an error everything is restored, too.
    """
    module = experts if isinstance(experts, torch.nn.Module) else None
    if module is None and parameters is None:
        raise InvalidArgument("parameters is None: without a module, run_step() needs the "
                              "parameters whose gradients it restores")
    layers = _layers_of(experts)
    ballot = _ballot_of(group, timeout)
    before = _State(module, list(module.parameters() if parameters is None else parameters))
    try:
        value, needs, overflow = _attempt(layers, step, ballot)
        if overflow:
            before.restore()
            with _exact(layers):
                value, needs, overflow_again = _attempt(layers, step, ballot)
            _grow(layers, needs, ballot)
            if overflow_again:
                raise InvalidArgument(
                    "step() made bounded plans although sizing was exact, as a captured graph "
                    "does: capture it again, now that capacities are "
                    f"{[layer.row_capacity for layer in layers]} rows")
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the GPU is lost: the first error says why
            before.restore()
        raise
    return StepResult(value, overflow)


def _layers_of(experts):
    """Returns each ExpertParallel once, in the order of first mention."""
    if isinstance(experts, torch.nn.Module):
        experts = [found for found in (getattr(module, "switchyard_experts", None)
                                       for module in experts.modules()) if found is not None]
    layers = list({id(layer): layer for layer in experts}.values())
    for layer in layers:
        if not hasattr(layer, "set_capacity"):
            raise InvalidArgument("experts must be ExpertParallel objects or a module, not "
                                  f"{type(layer).__name__}")
    return layers


class _Ballot:
    """Lets the ranks that repeat a step together exchange numbers at the end of it. A rank that
    fails tells the others and does not wait for their numbers: they may be in a collective of the
    program, which only ends when the process does."""

    def __init__(self, group, timeout):
        self.link = Link(group, timeout)  # its own link, which nothing else uses
        self.has_failed = False
        self._num_rounds = 0
        self._unheard = None  # the vote that was sent but not waited for

    def gather(self, numbers):
        """Returns the numbers [n] of every rank, or raises if one of them gave up."""
        vote = self._vote([0, *numbers])
        try:
            check(self.link._call("run_step", lambda: self.link._gloo.allgather(*vote),
                                  votes=True))
        except CommunicationError:
            self.has_failed = True
            raise
        told = [part.tolist() for part in vote[0][0]]
        failed = [rank for rank, (has_failed, *_) in enumerate(told) if has_failed]
        if failed:
            raise CommunicationError("; ".join(
                f"rank {rank} gave up: {self.link._read(self._reason_of(rank))}"
                for rank in failed))
        return [row for _, *row in told]

    def give_up(self, reason, num_numbers):
        """Takes the place of gather() on a rank that fails."""
        vote = self._vote([1] + [0] * num_numbers)
        self.link._store.set(self._reason_of(self.link.rank), reason)
        self.link._give_up(None, reason.encode())  # for ranks that find this process gone
        self._unheard = vote, self.link._gloo.allgather(*vote)

    def _vote(self, numbers):
        self._num_rounds += 1
        own = torch.tensor(numbers, dtype=torch.int64)
        return [[torch.empty_like(own) for _ in range(self.link.size)]], [own]

    def _reason_of(self, rank):
        return f"reasons/{self._num_rounds}/{rank}"


class _Alone:
    """The ballot of a single rank, which nobody waits for."""

    @staticmethod
    def gather(numbers):
        return [numbers]

    @staticmethod
    def give_up(_reason, _num_numbers):
        pass


_ballots = {}  # by the name of the group and the timeout
os.register_at_fork(after_in_child=_ballots.clear)


def _ballot_of(group, timeout):
    group = group_or_world(group)
    if group is None or group.size() == 1:
        return _Alone
    ballot = _ballots.get((group.group_name, timeout))
    if ballot is None or ballot.has_failed or ballot.link.is_destroyed:
        ballot = _ballots[group.group_name, timeout] = _Ballot(group, timeout)
    return ballot


class _State:
    """The state that a step changes, to be restored."""

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
                gradient.copy_(copy)  # in place, as it may be a view of a bucket
            parameter.grad = gradient
        for owner, name, buffer, copy in self._buffers:
            if copy is not None:
                buffer.copy_(copy)
            owner._buffers[name] = buffer
        self._counts.restore()
        torch.set_rng_state(self._random)
        for device, state in self._random_of:
            torch.cuda.set_rng_state(state, device)


def _attempt(layers, step, ballot):
    """Returns (the result of step(), the needs of every layer, whether any rank had no room)."""
    global _num_running
    for layer in layers:
        for words in _words_of(layer._dispatchers).values():
            words.zero_()
    _num_running += 1
    try:
        value = step()
        needs = _read(layers)
    except BaseException as error:
        reason = f"run_step: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # nobody may be left to tell
            ballot.give_up(reason, _NUM_VOTES)
        for layer in layers:
            with contextlib.suppress(Error):  # it has already given up
                layer.abort(reason)
        raise
    finally:
        _num_running -= 1
    bad = next(filter(None, map(_bad_id, layers, needs)), (0, 0))
    told = ballot.gather([any(own.overflow for own in needs), *bad])
    overflow = any(row[0] for row in told)
    for rank, (_, bad_id, num_experts) in enumerate(told):
        if num_experts > 0 and not overflow:  # exact plans raise on their own
            raise InvalidArgument(f"rank {rank} of {len(told)} made a plan with expert id {bad_id}"
                                  f", but there are {num_experts} experts")
    return value, needs, overflow


def _bad_id(layer, own):
    """Returns an invalid id and the number of experts, or None."""
    if own.minus_lowest_id > 1:
        return -own.minus_lowest_id, layer.num_experts
    if own.highest_id >= layer.num_experts and not layer.sentinels:
        return own.highest_id, layer.num_experts
    return None


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


def _grow(layers, needs, ballot):
    """Grows capacities to the needs of all ranks, including other groups of experts, so that each
    group learns from the others' overflows. Growing does no harm where ranks have other layers, as
    pipeline stages do."""
    most = max(row[0] for row in ballot.gather([len(layers)]))
    own = [number for of_layer in needs for number in (of_layer.rows, of_layer.tokens)]
    told = [max(numbers) for numbers in
            zip(*ballot.gather(own + [0] * (2 * most - len(own))))]
    for layer, rows, tokens in zip(layers, told[::2], told[1::2]):
        layer.set_capacity(_grown(layer.row_capacity, rows, layer.alignment),
                           _grown(layer.token_capacity, tokens, 1))


def _grown(capacity, needed, alignment):
    if capacity == 0 or needed <= capacity:  # a capacity of 0 is no bound
        return capacity
    return min(needed + needed // 8 + alignment - 1, _MOST_ROWS) // alignment * alignment


# The largest needs of a step's plans are collected on their device, in words [3 + 2 · ranks] i64:
# overflow, rows and tokens of every rank (see SharedPlan.needed), minus the lowest expert id, and
# the highest one. Each word starts at 0 and only grows.
_noted = weakref.WeakKeyDictionary()  # by Dispatchers: the words, by device


def _words_of(dispatchers):
    return {} if dispatchers is None else _noted.setdefault(dispatchers, {})


@define("note_plan", "(Tensor plan, Tensor expert_ids, int ranks) -> ()")
def _note_plan(plan, expert_ids, ranks):
    """Adds a plan's needs to those of the step while run_step() runs. A captured graph adds them on
    every replay."""
    if _num_running == 0 and not (plan.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    dispatchers = _shared_ops.of_number(ranks)
    size = dispatchers.link.size
    words = _words_of(dispatchers)
    if plan.device not in words:
        words[plan.device] = plan.new_zeros(3 + 2 * size, dtype=torch.int64)
    tables = dispatchers.tables
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
    """Returns the _Needs of every layer, with one read of each device's memory."""
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
