# SPDX-License-Identifier: Apache-2.0
"""Ranks, and the placement of experts on them."""
from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Callable, List, Optional, Sequence, Tuple, TypeVar

from ._arrays import I64, AnyArray, Result, View, empty, view, view_on
from ._device import Device, default_device
from ._handles import Handle
from ._library import InvalidArgument, check, library, words

library.switchyard_comm_rank.restype = ctypes.c_int64
library.switchyard_comm_size.restype = ctypes.c_int64
library.switchyard_comm_first_failed.restype = ctypes.c_int64
_OPS = {"sum": 0, "min": 1, "max": 2}
_T = TypeVar("_T")


class ExpertPlacement:
    """The rank that owns each expert. A rank holds its experts in ascending order of id."""

    def __init__(self, owners: Sequence[int], num_ranks: int):
        """owners[e] is the rank of expert e; a rank may own none."""
        if not all(0 <= owner < 2**31 for owner in owners):
            raise InvalidArgument(f"owners must be ranks, but are {list(owners)}")
        self._owners = (ctypes.c_int32 * len(owners))(*owners)
        self.num_ranks = int(num_ranks)
        check(library.switchyard_placement_check(self.pack))

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Places consecutive experts on consecutive ranks; the first ranks own one more if
        needed."""
        owners = (ctypes.c_int32 * max(int(num_experts), 0))()
        check(library.switchyard_placement_contiguous(ctypes.c_int64(num_experts),
                                                      ctypes.c_int64(num_ranks), owners))
        return ExpertPlacement(owners, num_ranks)

    @staticmethod
    def from_lists(num_experts: int, experts_of_rank: Sequence[Sequence[int]]) -> "ExpertPlacement":
        """experts_of_rank[r] lists the experts of rank r; every expert is listed once."""
        owners = [-1] * num_experts
        for rank, experts in enumerate(experts_of_rank):
            for expert in experts:
                if not 0 <= expert < num_experts or owners[expert] >= 0:
                    raise InvalidArgument(f"rank {rank} lists expert {expert}, which is not one of "
                                          f"{num_experts} or is listed twice")
                owners[expert] = rank
        return ExpertPlacement(owners, len(experts_of_rank))

    @property
    def num_experts(self) -> int:
        return len(self._owners)

    @property
    def owners(self) -> Tuple[int, ...]:
        return tuple(self._owners)

    def experts_of(self, rank: int) -> List[int]:
        """Returns the rank's experts in ascending order; none for a rank outside the placement."""
        return [expert for expert, owner in enumerate(self._owners) if owner == rank]

    @property
    def words(self) -> tuple:
        """The fields of a switchyard_placement."""
        return ctypes.addressof(self._owners), len(self._owners), self.num_ranks

    @property
    def pack(self) -> bytes:
        return words(*self.words)

    def __eq__(self, other: Any) -> bool:
        return (isinstance(other, ExpertPlacement) and self.num_ranks == other.num_ranks and
                self.owners == other.owners)

    def __hash__(self) -> int:
        return hash((self.num_ranks, self.owners))

    def __repr__(self) -> str:
        return f"ExpertPlacement({list(self._owners)}, {self.num_ranks})"


class Communicator:
    """One rank of a group, and the collectives between its ranks.

    Every rank makes the same calls in the same order, with arrays in host memory; results are new
    arrays. CommunicationError is raised if a rank fails, makes another call or does not arrive
    within the timeout. The communicator is unusable afterwards.
    """

    def __init__(self, pointer: ctypes.c_void_p):
        self._handle = Handle(pointer, library.switchyard_comm_free, "communicator")
        self.rank: int = library.switchyard_comm_rank(pointer)
        self.size: int = library.switchyard_comm_size(pointer)
        self._groups: "weakref.WeakSet[Communicator]" = weakref.WeakSet()

    def barrier(self) -> None:
        self._call("barrier")

    def all_reduce(self, values: AnyArray, op: str = "sum") -> Result:
        """Returns the "sum", "min" or "max" of all ranks' values. Sums are added in rank order."""
        result, memory = _copy(values, "values")
        self._call("all_reduce", memory.pack, ctypes.c_int64(_op(op)))
        return result

    def all_gather(self, send: AnyArray) -> Result:
        """Returns `send` [n, …] of all ranks, in rank order: [size · n, …]."""
        given = _on_host(send, "send")
        result, memory = empty(default_device(), (self.size * given.shape[0], *given.shape[1:]),
                               given.dtype)
        self._call("all_gather", given.pack, memory.pack)
        return result

    def reduce_scatter(self, send: AnyArray, op: str = "sum") -> Result:
        """Reduces `send` [size · n, …] over all ranks, and returns this rank's part, [n, …]."""
        given = _on_host(send, "send")
        if given.shape[0] % self.size != 0:
            raise InvalidArgument(f"send is {list(given.shape)}, but must have a multiple of "
                                  f"{self.size} rows")
        result, memory = empty(default_device(), (given.shape[0] // self.size, *given.shape[1:]),
                               given.dtype)
        self._call("reduce_scatter", given.pack, memory.pack, ctypes.c_int64(_op(op)))
        return result

    def broadcast(self, values: AnyArray, root: int = 0) -> Result:
        """Returns the values of `root`. All ranks pass arrays of the same shape and dtype."""
        result, memory = _copy(values, "values")
        self._call("broadcast", memory.pack, ctypes.c_int64(root))
        return result

    def all_to_all(self, send: AnyArray, send_rows: Sequence[int]) -> Tuple[Result, List[int]]:
        """Sends send_rows[d] rows of `send` [Σ send_rows, …] to each rank d, in order. Returns the
        rows that the ranks sent here, by rank, and how many each of them sent."""
        given = _on_host(send, "send")
        if len(send_rows) != self.size:
            raise InvalidArgument(f"send_rows has {len(send_rows)} entries, but must have one for "
                                  f"each of {self.size} ranks")
        recv_rows = self._exchange_counts(send_rows)
        result, memory = empty(default_device(), (sum(recv_rows), *given.shape[1:]), given.dtype)
        self._call("all_to_all", given.pack, words(*map(int, send_rows)), memory.pack,
                   words(*recv_rows))
        return result, recv_rows

    def split(self, color: int, key: int = 0) -> Optional["Communicator"]:
        """Returns the group of the ranks that pass this color, in the order of (key, rank), or None
        if the color is negative."""
        group = ctypes.c_void_p()
        self._call("split", ctypes.c_int64(color), ctypes.c_int64(key), ctypes.byref(group))
        if not group:
            return None
        made = Communicator(group)
        self._groups.add(made)
        return made

    def abort(self, reason: str) -> None:
        """Gives up on behalf of this rank: the other ranks raise an error with the reason."""
        self._call("abort", reason.encode())

    def close(self) -> None:
        """Ends this rank's participation. Further calls raise InvalidArgument."""
        for group in list(self._groups):
            group.close()
        self._handle.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}>"

    def _exchange_counts(self, rows: Sequence[int]) -> List[int]:
        counts = (ctypes.c_int64 * self.size)(*rows)
        received = (ctypes.c_int64 * self.size)()
        one_each = words(*[1] * self.size)
        form = [View(ctypes.addressof(memory), (self.size,), I64, ("cpu", 0), False, memory).pack
                for memory in (counts, received)]
        self._call("all_to_all", form[0], one_each, form[1], one_each)
        return list(received)

    def _call(self, name: str, *args: Any) -> None:
        with self._handle as pointer:
            check(getattr(library, f"switchyard_comm_{name}")(pointer, *args))

    def _first_failed(self) -> int:
        with self._handle as pointer:
            return library.switchyard_comm_first_failed(pointer)

    def _tell(self, operation: str, error: BaseException) -> None:
        """Aborts if this rank failed before it could make its call, so that no rank waits for
        it."""
        if self.size > 1 and not self._handle.is_closed:
            self.abort(f"{operation}: {error}")


def _op(op: str) -> int:
    if op not in _OPS:
        raise InvalidArgument(f"op is {op!r}, but must be 'sum', 'min' or 'max'")
    return _OPS[op]


def _on_host(value: AnyArray, name: str) -> View:
    return view_on(default_device(), value, name)


def _copy(value: AnyArray, name: str) -> Tuple[Result, View]:
    source = _on_host(value, name)
    result, memory = empty(default_device(), source.shape, source.dtype)
    ctypes.memmove(memory.pointer, source.pointer, result.nbytes)
    return result, memory


def _milliseconds(seconds: float) -> ctypes.c_int64:
    return ctypes.c_int64(min(round(seconds * 1000), 2**62))


def connect(backend: str = "threads", *, timeout: float = 600.0) -> Communicator:
    """Joins the group that the environment defines: all processes of the job for "mpi", this
    process alone for "threads". A collective waits for up to `timeout` seconds."""
    pointer = ctypes.c_void_p()
    check(library.switchyard_comm_connect(backend.encode(), _milliseconds(timeout),
                                          ctypes.byref(pointer)))
    return Communicator(pointer)


class _Ranks:
    """The threads of run_ranks."""

    def __init__(self, num_ranks: int, function: Callable[[Communicator], Any], timeout: float):
        pointers = (ctypes.c_void_p * max(num_ranks, 1))()
        check(library.switchyard_comm_threads(ctypes.c_int64(num_ranks), _milliseconds(timeout),
                                              pointers))
        self.comms = [Communicator(ctypes.c_void_p(pointer)) for pointer in pointers]
        self.function = function
        self.results: List[Any] = [None] * num_ranks
        self.errors: List[Optional[BaseException]] = [None] * num_ranks
        self.first_failed = -1

    def run(self, rank: int) -> None:
        comm = self.comms[rank]
        try:
            self.results[rank] = self.function(comm)
        except BaseException as error:  # pylint: disable=broad-except
            self.errors[rank] = error
            if not comm._handle.is_closed:
                comm.abort(f"{type(error).__name__}: {error}")
                self.first_failed = comm._first_failed()
        finally:
            comm.close()

    def end(self, reason: str) -> None:
        """Aborts all ranks from outside of them."""
        for comm in self.comms:
            try:
                comm.abort(reason)
            except InvalidArgument:  # the rank has ended
                pass

    def error(self) -> Optional[BaseException]:
        """Returns the error that came first."""
        if self.first_failed >= 0 and self.errors[self.first_failed] is not None:
            return self.errors[self.first_failed]
        return next((error for error in self.errors if error is not None), None)


def run_ranks(num_ranks: int, function: Callable[[Communicator], _T], *,
              timeout: float = 600.0) -> List[_T]:
    """Calls function(comm) on num_ranks ranks, each on its own thread, and returns the results by
    rank.

    If a rank raises, the others are woken from their collectives, and the first error is raised
    here. A rank's communicator is closed when its function returns.
    """
    ranks = _Ranks(num_ranks, function, timeout)
    threads = [threading.Thread(target=ranks.run, args=(rank,), name=f"switchyard rank {rank}")
               for rank in range(num_ranks)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in threads:
            thread.join()
    except BaseException as error:
        ranks.end(f"{type(error).__name__} in run_ranks")
        for thread in started:
            thread.join()
        raise
    error = ranks.error()
    if error is not None:
        raise error
    return ranks.results


def reshard(shard: Sequence[AnyArray], before: ExpertPlacement, after: ExpertPlacement,
            comm: Communicator, *, device: Optional[Device] = None) -> List[Result]:
    """Moves experts between ranks. Collective.

    Arrays [experts of this rank under `before`, …], of weights or optimizer state, become [experts
    of this rank under `after`, …]. An expert that changes its owner is sent once. A placement may
    have fewer ranks than the communicator; the remaining ranks own nothing.
    """
    try:
        device = device or (default_device(view(shard[0], "shard[0]").place) if shard
                            else default_device())
        given = [view_on(device, array, f"shard[{i}]") for i, array in enumerate(shard)]
        num_after = len(after.experts_of(comm.rank))
        made = [empty(device, (num_after, *memory.shape[1:]), memory.dtype) for memory in given]
    except Exception as error:
        comm._tell("reshard", error)
        raise
    with comm._handle as pointer:
        check(library.switchyard_reshard(
            pointer, device._handle, device._stream, before.pack, after.pack,
            ctypes.c_int64(len(given)), b"".join(memory.pack for memory in given),
            b"".join(memory.pack for _, memory in made)))
    return [result for result, _ in made]
