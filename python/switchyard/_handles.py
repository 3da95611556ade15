"""Objects of the library that Python owns."""
from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Callable

from ._library import InvalidArgument

_lock = threading.Lock()


class _State:
    __slots__ = ("pointer", "free", "users", "is_closed")

    def __init__(self, pointer: ctypes.c_void_p, free: Callable[[ctypes.c_void_p], Any]):
        self.pointer = pointer
        self.free = free
        self.users = 0
        self.is_closed = False


def _close(state: _State) -> None:
    with _lock:
        is_last = not state.is_closed and state.users == 0
        state.is_closed = True
    if is_last:
        state.free(state.pointer)


class Handle:
    """A pointer that is freed once: when it is closed and no call uses it, or with this object.

    `with handle as pointer:` surrounds calls that use it, and raises once it is closed.
    """

    def __init__(self, pointer: ctypes.c_void_p, free: Callable[[ctypes.c_void_p], Any], name: str):
        self._state = _State(pointer, free)
        self._name = name
        weakref.finalize(self, _close, self._state)

    def __enter__(self) -> ctypes.c_void_p:
        with _lock:
            if self._state.is_closed:
                raise InvalidArgument(f"this {self._name} is closed")
            self._state.users += 1
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
