"""The library's devices for torch's: its threads, its streams and its memory."""
import ctypes
import os
import threading

import torch

from .._library import check as _check_result
from .._library import library

_LEGACY_STREAM = 1  # CUDA's name for its default stream, which torch calls 0
_devices = {}  # by GPU, or by the CPU's number of threads, negative
_lock = threading.Lock()
_thread = threading.local()  # .error: of an allocation within the call that is going on
os.register_at_fork(after_in_child=_devices.clear)  # whose threads the child does not have
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_callbacks = []  # which the library keeps pointers to


def _make_cpu(num_threads):
    handle = ctypes.c_void_p()
    check(library.switchyard_device_cpu(ctypes.c_int64(num_threads), ctypes.byref(handle)))
    return handle


def _make_cuda(index):
    """A device whose memory is that of torch's allocator."""

    # The library has made the GPU the thread's current one. The functions of torch.cuda do the same
    # again, which takes longer than the allocation.
    def allocate(size, stream):
        try:
            return torch._C._cuda_cudaCachingAllocator_raw_alloc(
                size, 0 if stream == _LEGACY_STREAM else stream)
        except BaseException as error:  # which C could not pass on
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
    """The library's device for a tensor's, and torch's current stream there."""
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
    """Raises what a call of the library reports, or what torch's allocator raised within it."""
    error, _thread.error = getattr(_thread, "error", None), None
    if error is not None:
        raise error
    _check_result(result)


def host_syncs(device):
    """How often the library has waited for a GPU so far."""
    handle = _devices.get(torch.device(device).index or 0)
    return 0 if handle is None else library.switchyard_device_host_syncs(handle)
