# SPDX-License-Identifier: Apache-2.0
"""The devices that functions and layers compute on."""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Dict, Optional, Tuple

from ._library import InvalidArgument, check, library

# CUDA's handle of its default stream, which other libraries use by default too.
DEFAULT_STREAM = 1
_defaults: Dict[Tuple[str, int], "Device"] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_defaults.clear)  # a child process lacks their threads


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _free(handle: ctypes.c_void_p, process: int) -> None:
    if process == os.getpid():  # a forked child lacks the threads that freeing waits for
        library.switchyard_device_free(handle)


class Device:
    """A CPU or a GPU, and the memory that it keeps for reuse.

    Device("cpu", threads=8) computes on 8 threads; without `threads`, on every core that the
    process may use. Device("cuda", 1) is the second GPU, whose work goes to `stream`, a
    cudaStream_t as a number, or by default to CUDA's default stream. Results do not depend on the
    number of threads. Any thread may use a device; its calls run one at a time.
    """

    def __init__(self, kind: str = "cpu", ordinal: int = 0, *, threads: Optional[int] = None,
                 stream: int = DEFAULT_STREAM):
        if kind not in ("cpu", "cuda"):
            raise InvalidArgument(f"kind is {kind!r}, but must be 'cpu' or 'cuda'")
        self.kind = kind
        self.ordinal = int(ordinal) if kind == "cuda" else 0
        self.threads = 0
        self._handle = ctypes.c_void_p()
        if kind == "cpu":
            self.threads = num_cores() if threads is None else int(threads)
            check(library.switchyard_device_cpu(ctypes.c_int64(self.threads),
                                                ctypes.byref(self._handle)))
        else:
            check(library.switchyard_device_cuda(ctypes.c_int64(self.ordinal), ctypes.c_int64(0),
                                                 None, None, ctypes.byref(self._handle)))
        self._stream = ctypes.c_void_p(stream if kind == "cuda" else None)
        weakref.finalize(self, _free, self._handle, os.getpid())

    @property
    def place(self) -> Tuple[str, int]:
        """The location of its memory: the kind and the ordinal."""
        return self.kind, self.ordinal

    @property
    def host_syncs(self) -> int:
        """The number of times that calls have waited for this GPU so far."""
        return library.switchyard_device_host_syncs(self._handle)

    @property
    def bytes_held(self) -> int:
        """The bytes of memory in use or kept for reuse."""
        return library.switchyard_device_bytes_held(self._handle)

    def synchronize(self) -> None:
        """Waits for all work on the device's stream."""
        check(library.switchyard_synchronize(self._handle, self._stream))

    def __repr__(self) -> str:
        if self.kind == "cpu":
            return f"Device('cpu', threads={self.threads})"
        return f"Device('cuda', {self.ordinal})"


def default_device(place: Tuple[str, int] = ("cpu", 0), threads: Optional[int] = None) -> Device:
    """Returns the device for functions that are given none, creating it on first use."""
    kind, ordinal = place
    key = (kind, (threads or num_cores()) if kind == "cpu" else ordinal)
    with _lock:
        if key not in _defaults:
            _defaults[key] = Device(kind, ordinal, threads=key[1] if kind == "cpu" else None)
        return _defaults[key]
