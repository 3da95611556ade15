# SPDX-License-Identifier: Apache-2.0
"""Library objects that Python owns."""
from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any, Callable

from ._library import InvalidArgument

_lock = threading.RLock()  # reentrant: garbage collection may close another handle


class _State:
    __slots__ = ("pointer", "free", "users", "is_closed", "process")

    def __init__(self, pointer: ctypes.c_void_p, free: Callable[[ctypes.c_void_p], Any]):
        self.pointer = pointer
        self.free = free
        self.users = 0
        self.is_closed = False
        self.process = os.getpid()


def _close(state: _State) -> None:
    if state.process != os.getpid():
        return  # a forked child lacks the threads that freeing waits for
    with _lock:
        is_last = not state.is_closed and state.users == 0
        state.is_closed = True
    if is_last:
        state.free(state.pointer)


class Handle:
    """A pointer that is freed once: after it is closed and no call uses it, or with this object.

    `with handle as pointer:` surrounds calls that use the pointer, and raises once it is closed.
    """

    def __init__(self, pointer: ctypes.c_void_p, free: Callable[[ctypes.c_void_p], Any], name: str):
        self._state = _State(pointer, free)
        self._name = name
        weakref.finalize(self, _close, self._state)

    def __enter__(self) -> ctypes.c_void_p:
        with _lock:
            is_open = not self._state.is_closed and self._state.process == os.getpid()
            self._state.users += is_open
        if not is_open:
            raise InvalidArgument(f"this {self._name} is closed" if self._state.is_closed else
                                  f"this {self._name} belongs to the parent process; make a new "
                                  "one after fork()")
        return self._state.pointer

    def __exit__(self, *_error: Any) -> None:
        with _lock:
            self._state.users -= 1
            is_last = self._state.is_closed and self._state.users == 0
        if is_last:
            self._state.free(self._state.pointer)

    @property
    def is_closed(self) -> bool:
        return self._state.is_closed

    def close(self) -> None:
        _close(self._state)
