# SPDX-License-Identifier: Apache-2.0
"""The ranks of torch.distributed as a communicator of the library.

Host data goes over the library's own gloo connections between the ranks of the caller's group. So
it never interferes with the program's collectives, has its own deadline, and works even if the
caller's group is for GPUs only. These connections are for setup; rows do not travel over them.
"""
import ctypes
import datetime
import json
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist

from .._library import CommunicationError, InvalidArgument, check, library
from .._ranks import Communicator

_COMMUNICATION_ERROR = 3
_GRACE = 2.0  # seconds that another rank has to say why it failed
_LOOK = 0.25  # seconds between a waiting rank's checks for ranks that have ended
_SILENCE = 5.0  # seconds after which torch's store is considered dead
_links = {}  # by the name of the caller's group and the timeout
_num_links = {}  # how many were made, by the name of the caller's group
_alive = weakref.WeakSet()  # all links
_kept = []  # the parent's links: ending one waits for threads that a forked child lacks


def _forget_links():
    _kept.extend(_alive)
    _links.clear()
    _num_links.clear()


os.register_at_fork(after_in_child=_forget_links)

_ALL_TO_ALL = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)
_ALL_GATHER = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int64)
_BROADCAST = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_int64)
_BARRIER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_GIVE_UP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


def group_of(ranks):
    """Returns the process group of a one-dimensional DeviceMesh, or the group that was given."""
    if isinstance(ranks, dist.ProcessGroup):
        return ranks
    if not hasattr(ranks, "get_group"):
        raise InvalidArgument(f"expected a process group or a DeviceMesh of one dimension, not "
                              f"{type(ranks).__name__}")
    if ranks.ndim != 1:
        raise InvalidArgument(f"the mesh has {ranks.ndim} dimensions {ranks.mesh_dim_names}: pass "
                              "the one that experts are divided over, mesh['ep']")
    return ranks.get_group()


def _ranks(numbers):
    """Returns "rank 2" or "ranks 0, 3", for example."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _bytes(address, size):
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _numbers(address, count):
    return list((ctypes.c_int64 * count).from_address(address))


def _started_at(process):
    """Returns when a process of this host began, or None once it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _own_identity():
    """Returns (place, process, when it began). Processes of the same place can look each other
    up."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        where = boot.read().strip() + os.readlink("/proc/self/ns/pid")
    return where, os.getpid(), _started_at(os.getpid())


class Link:
    """The functions that the library calls, and the state that explains their failures."""

    def __init__(self, group, timeout):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self._group = group
        # The number of links made before is the same on all ranks of the group, so it names this one.
        number = _num_links[group.group_name] = _num_links.get(group.group_name, -1) + 1
        self._store = dist.PrefixStore(f"switchyard/{group.group_name}/{number}",
                                       dist.distributed_c10d._get_default_store())
        self._num_calls = 0
        self._num_users = 0
        self._abandoned = []  # memory of failed collectives
        self._is_store_silent = False
        self.dispatchers = {}  # shared by the layers over these ranks, by their options
        self._identities = self._meet()
        try:
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), self.rank,
                                               self.size, datetime.timedelta(seconds=timeout))
        except RuntimeError as error:
            raise CommunicationError(self._explain("connecting", error)) from error
        # The library keeps pointers to these functions.
        self._functions = tuple(kind(_guarded(function)) for kind, function in (
            (_ALL_TO_ALL, self._all_to_all), (_ALL_GATHER, self._all_gather),
            (_BROADCAST, self._broadcast), (_BARRIER, self._barrier),
            (_GIVE_UP, self._give_up)))
        pointers = (ctypes.c_void_p * 5)(*[ctypes.cast(f, ctypes.c_void_p)
                                           for f in self._functions])
        pointer = ctypes.c_void_p()
        check(library.switchyard_comm_foreign(
            ctypes.c_int64(self.rank), ctypes.c_int64(self.size),
            ctypes.c_int64(round(timeout * 1000)), pointers, None, ctypes.byref(pointer)))
        self.communicator = Communicator(pointer)
        self.communicator._link = self  # keeps the functions alive
        _alive.add(self)

    def _meet(self):
        """Returns the identities of all ranks once all of them have arrived."""
        deadline = time.monotonic() + self.timeout
        own = json.dumps(_own_identity())
        self._ask(lambda: self._store.set(f"who/{self.rank}", own))
        found = {}
        while len(found) < self.size:
            for rank in set(range(self.size)) - found.keys():
                answer = self._read(f"who/{rank}")
                if answer is not None:
                    found[rank] = tuple(json.loads(answer))
            if len(found) < self.size and (time.monotonic() > deadline or self._is_store_silent):
                absent = sorted(set(range(self.size)) - found.keys())
                raise CommunicationError(self._silence() or (
                    f"{_ranks(absent)} did not arrive within {self.timeout:g} s, when experts were "
                    f"divided over the {self.size} ranks of the process group"))
            time.sleep(0.002)
        return [found[rank] for rank in range(self.size)]

    def _ask(self, question):
        """Returns the answer of torch's store, or None if there is none: its functions have no
        deadline, and the process that hosts it may have stopped."""
        if self._is_store_silent:
            return None
        answer = []

        def ask():
            try:
                answer.append(question())
            except RuntimeError:  # the process that hosts the store has ended
                answer.append(None)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(min(_SILENCE, self.timeout))
        self._is_store_silent = not answer
        return answer[0] if answer else None

    def _silence(self):
        return ("torch's store does not answer: the process that hosts it, which is rank 0 of the "
                "job unless torchrun does, has stopped") if self._is_store_silent else ""

    @property
    def is_destroyed(self):
        """True if the program has destroyed its process group."""
        return self._group not in dist.distributed_c10d._world.pg_map

    def require_group(self):
        if self.is_destroyed:
            raise CommunicationError(
                "the process group was destroyed: call destroy_process_group() after the last "
                "use of the experts that are divided over it")

    def _exchange(self, operation, function, recv, send):
        """Runs a collective on bytes for the library. Returns 0 or an error code.

        function(recv, send) works on its own memory: after a failure, gloo may still write to it
        long after the library has freed its own buffers."""
        own = torch.empty_like(recv), send.clone()
        result = self._call(operation, lambda: function(*own))
        if result == 0:
            recv.copy_(own[0])
        else:
            self._abandoned.append(own)
        return result

    def _call(self, operation, start, *, votes=False):
        """Waits for the work that start() begins. Returns 0 or an error code. If ranks vote on
        whether to go on, a rank that gave up has voted too, so waiting for it goes on."""
        self._num_calls += 1
        try:
            self.require_group()
            self._ask(lambda: self._store.set(f"calls/{self.rank}", str(self._num_calls)))
            work = start()
            self._wait_while(lambda: not work.is_completed(), votes)
            work.wait()
            return 0
        except BaseException as error:  # C could not pass it on
            return library.switchyard_fail(_COMMUNICATION_ERROR,
                                           self._explain(operation, error).encode())

    def _wait_while(self, is_pending, votes):
        """Waits for the other ranks. Raises if one of them is known not to come."""
        begin = time.monotonic()
        next_look = begin + _LOOK
        while is_pending():
            now = time.monotonic()
            if now > next_look:
                reasons = self._ended() + ([] if votes else self._gave_up())
                if reasons:
                    raise CommunicationError("; ".join(reasons))
                next_look = now + _LOOK
            time.sleep(min(0.01, (now - begin) / 10 + 1e-5))

    def _explain(self, operation, error):
        if self.is_destroyed:
            return str(error)
        deadline = time.monotonic() + min(_GRACE, self.timeout)
        while True:
            reasons = self._ended() + self._gave_up()
            if reasons or self._is_store_silent or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        reasons = reasons or self._missing()
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "; ".join(reasons) or self._silence() or (
            f"{operation} failed, although all ranks arrived: {first_line}")

    def _ended(self):
        where = self._identities[self.rank][0]
        return [f"rank {rank} has ended (process {process})"
                for rank, (place, process, began) in enumerate(self._identities)
                if place == where and _started_at(process) != began]

    def _read(self, key):
        answer = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if answer is None else answer.decode()

    def _gave_up(self):
        told = ((rank, self._read(f"gave_up/{rank}")) for rank in range(self.size)
                if rank != self.rank)
        return [f"rank {rank} gave up: {reason}" for rank, reason in told if reason is not None]

    def _missing(self):
        calls = [int(self._read(f"calls/{rank}") or 0) for rank in range(self.size)]
        if self._is_store_silent:
            return []
        late = [rank for rank, count in enumerate(calls) if count < self._num_calls]
        return [f"{_ranks(late)} did not arrive within {self.timeout:g} s"] if late else []

    def _all_to_all(self, _context, send, send_bytes, recv, recv_bytes):
        sent, received = _numbers(send_bytes, self.size), _numbers(recv_bytes, self.size)
        return self._exchange("all_to_all", lambda out, own: self._gloo.alltoall_base(
            out, own, received, sent, dist.AllToAllOptions()),
            _bytes(recv, sum(received)), _bytes(send, sum(sent)))

    def _all_gather(self, _context, send, recv, size):
        if size == 0:
            return self._barrier(None)
        return self._exchange("all_gather", lambda out, own: self._gloo.allgather(
            [list(out.chunk(self.size))], [own]), _bytes(recv, self.size * size),
            _bytes(send, size))

    def _broadcast(self, _context, data, size, root):
        options = dist.BroadcastOptions()
        options.rootRank = root

        def broadcast(out, own):
            out.copy_(own)
            return self._gloo.broadcast([out], options)

        return self._exchange("broadcast", broadcast, _bytes(data, size), _bytes(data, size))

    def _barrier(self, _context):
        return self._exchange("barrier", lambda _out, _own: self._gloo.barrier(), _bytes(0, 0),
                              _bytes(0, 0))

    def _give_up(self, _context, reason):
        told = reason.decode(errors="replace")
        self._ask(lambda: self._store.set(f"gave_up/{self.rank}", told))


def _guarded(function):
    """Wraps a function that C calls, since C could not pass its errors on."""

    def call(*args):
        try:
            return function(*args)
        except BaseException as error:
            return library.switchyard_fail(_COMMUNICATION_ERROR,
                                           f"{type(error).__name__}: {error}".encode())

    return call


def link_to(ranks, timeout):
    """Returns the link over the ranks of a process group or mesh. It lives until every user has
    released it. Collective on the first call."""
    group = group_of(ranks)
    key = group.group_name, timeout
    link = _links.get(key)
    if link is None or link.is_destroyed:
        link = _links[key] = Link(group, timeout)
    link._num_users += 1
    return link


def release(link):
    """Drops one user. Without users, the next link over the same ranks is a new one."""
    link._num_users -= 1
    if link._num_users == 0:
        for key in [key for key, known in _links.items() if known is link]:
            del _links[key]
        link.communicator.close()
        link._gloo = None  # ends its threads now, rather than in a forked child


def communicator(ranks, *, timeout=600.0):
    """Returns the ranks of a process group, or of a one-dimensional DeviceMesh, as a Communicator
    for switchyard.MoeLayer and similar objects. Collective. Its collectives wait for up to
    `timeout` seconds, whatever the group's own timeout."""
    return Link(group_of(ranks), timeout).communicator
