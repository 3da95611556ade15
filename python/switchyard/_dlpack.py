# SPDX-License-Identifier: Apache-2.0
"""Reads and makes DLPack capsules with ctypes."""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Tuple

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_READ_ONLY = 1


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _DLTensor)]


_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
# A capsule that is being destroyed must not be reference-counted again, so it is passed by address.
_raw_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api))
_raw_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api))


class Tensor(NamedTuple):
    """The tensor in a capsule. Strides are in elements."""
    pointer: int
    device: Tuple[int, int]
    code: int
    bits: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    read_only: bool


def contiguous_strides(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _of(tensor: _DLTensor, read_only: bool) -> Tensor:
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = (tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides
               else contiguous_strides(shape))
    # Elements of several lanes have no dtype here, and a width of 0 matches none.
    bits = tensor.bits if tensor.lanes == 1 else 0
    return Tensor((tensor.data or 0) + tensor.byte_offset, (tensor.device_type, tensor.device_id),
                  tensor.code, bits, shape, strides, read_only)


def read(capsule: Any) -> Tensor:
    """Returns the tensor of a capsule, which stays unconsumed. It is valid while the capsule
    lives."""
    if _api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        pointer = _api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        managed = _ManagedVersioned.from_address(pointer)
        if managed.major != 1:
            raise BufferError(f"a capsule of DLPack {managed.major}.{managed.minor} came, "
                              "but only 1.x can be read")
        return _of(managed.tensor, bool(managed.flags & _READ_ONLY))
    pointer = _api.PyCapsule_GetPointer(capsule, b"dltensor")
    return _of(_Managed.from_address(pointer).tensor, False)


_exported: dict = {}  # by address: the tensors that consumers hold


def _forget(pointer: int, exported: dict = _exported) -> None:
    exported.pop(pointer, None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter = _DELETER(_forget)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
# Consumers may outlive this module, because Python clears modules first when it exits.
for _immortal in (_exported, _deleter):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))


@_DESTRUCTOR
def _destroy(capsule: int) -> None:
    if _raw_is_valid(capsule, b"dltensor"):  # no consumer has taken it
        _forget(_raw_pointer(capsule, b"dltensor"))


def make(pointer: int, device: Tuple[int, int], code: int, bits: int, shape: Tuple[int, ...],
         owner: Any) -> Any:
    """Returns a capsule of contiguous memory that keeps `owner` alive while a consumer holds it."""
    extents = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    strides = (ctypes.c_int64 * max(len(shape), 1))(*contiguous_strides(shape))
    managed = _Managed(
        _DLTensor(pointer, device[0], device[1], len(shape), code, bits, 1,
                  ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)),
                  ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)), 0),
        None, ctypes.cast(_deleter, ctypes.c_void_p))
    address = ctypes.addressof(managed)
    _exported[address] = (managed, extents, strides, owner)
    return _api.PyCapsule_New(address, b"dltensor", ctypes.cast(_destroy, ctypes.c_void_p))
