# SPDX-License-Identifier: Apache-2.0
"""The library's devices for those of torch, with torch's threads, streams and memory."""
import ctypes
import os
import threading

import torch

from .._library import check as _check_result
from .._library import library

_LEGACY_STREAM = 1  # CUDA's handle of its default stream, which torch calls 0
_devices = {}  # by GPU index, or by minus the CPU's number of threads
_lock = threading.Lock()
_thread = threading.local()  # .error: raised by an allocation within the current call
os.register_at_fork(after_in_child=_devices.clear)  # a child process lacks their threads
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_callbacks = []  # the library keeps pointers to them


def _make_cpu(num_threads):
    handle = ctypes.c_void_p()
    check(library.switchyard_device_cpu(ctypes.c_int64(num_threads), ctypes.byref(handle)))
    return handle


def _make_cuda(index):
    """Makes a device that takes its memory from torch's allocator."""

    # The library has made this GPU the thread's current one. The functions of torch.cuda would do
    # so again, which takes longer than the allocation.
    def allocate(size, stream):
        try:
            return torch._C._cuda_cudaCachingAllocator_raw_alloc(
                size, 0 if stream == _LEGACY_STREAM else stream)
        except BaseException as error:  # C could not pass it on
            _thread.error = error
            return None

    def free(memory, _stream):
        try:
            torch._C._cuda_cudaCachingAllocator_raw_delete(memory)
        except BaseException as error:
            _thread.error = error

    callbacks = (_ALLOCATE(allocate), _FREE(free))
    _callbacks.append(callbacks)
    handle = ctypes.c_void_p()
    check(library.switchyard_device_cuda(ctypes.c_int64(index), ctypes.c_int64(0), *callbacks,
                                         ctypes.byref(handle)))
    return handle


def device_of(tensor):
    """Returns the library's device for a tensor, and torch's current stream there."""
    if tensor.is_cuda:
        index = tensor.device.index
        stream = torch._C._cuda_getCurrentRawStream(index) or _LEGACY_STREAM
        key = index
    else:
        stream = None
        key = -torch.get_num_threads()
    handle = _devices.get(key)
    if handle is None:
        with _lock:
            handle = _devices.get(key) or (_make_cuda(key) if key >= 0 else _make_cpu(-key))
            _devices[key] = handle
    return handle, ctypes.c_void_p(stream)


def check(result):
    """Raises the error that a library call reports, or that torch's allocator raised within it."""
    error, _thread.error = getattr(_thread, "error", None), None
    if error is not None:
        raise error
    _check_result(result)


def host_syncs(device):
    """Returns how often the library has waited for a GPU so far."""
    handle = _devices.get(torch.device(device).index or 0)
    return 0 if handle is None else library.switchyard_device_host_syncs(handle)
