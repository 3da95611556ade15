# SPDX-License-Identifier: Apache-2.0
"""Converts numpy arrays, and anything that supports DLPack, to and from the library's tensors."""
from __future__ import annotations

import ctypes
import struct
import weakref
from typing import Any, Optional, Sequence, Tuple, Union

import numpy as np

from . import _dlpack
from ._device import DEFAULT_STREAM, Device, default_device
from ._library import InvalidArgument, Unsupported, check, library

# Dtypes in the library's numbering. The last one occurs only in checkpoints.
NAMES = ("float32", "bfloat16", "int32", "int64", "float16")
F32, BF16, I32, I64, F16 = range(5)
_SIZES = (4, 2, 4, 8, 2)
_DLPACK_CODES = ((2, 32), (4, 16), (0, 32), (0, 64), (2, 16))  # code and bits
_NUMPY = (np.dtype("float32"), None, np.dtype("int32"), np.dtype("int64"), np.dtype("float16"))
_TENSOR = struct.Struct("7q")
NO_TENSOR = _TENSOR.pack(0, 0, 0, 0, 0, 0, 0)
Place = Tuple[str, int]


class View:
    """The contiguous memory of an array, and the object that owns it."""

    __slots__ = ("pointer", "shape", "dtype", "place", "read_only", "owner")

    def __init__(self, pointer: int, shape: Tuple[int, ...], dtype: int, place: Place,
                 read_only: bool, owner: Any):
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.place = place
        self.read_only = read_only
        self.owner = owner

    @property
    def pack(self) -> bytes:
        """The array as a switchyard_tensor."""
        extents = self.shape + (0,) * (4 - len(self.shape))
        return _TENSOR.pack(self.pointer, self.dtype, len(self.shape), *extents)


class Array:
    """An array in memory of the library: bf16, which numpy lacks, or data on a GPU.

    torch.from_dlpack(array), jax.numpy.from_dlpack(array) and similar functions share its memory.
    """

    def __init__(self, pointer: int, shape: Tuple[int, ...], dtype: int, device: Device,
                 owner: Any):
        self._pointer = pointer
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._owner = owner

    @property
    def shape(self) -> Tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return _num_elements(self._shape)

    @property
    def dtype(self) -> str:
        """One of "float32", "bfloat16", "int32" and "int64"."""
        return NAMES[self._dtype]

    @property
    def nbytes(self) -> int:
        return self.size * _SIZES[self._dtype]

    @property
    def device(self) -> Device:
        return self._device

    def numpy(self) -> np.ndarray:
        """Returns a numpy array: a view on a CPU, or a copy from a GPU, which waits for it."""
        if _NUMPY[self._dtype] is None:
            raise Unsupported("numpy has no bfloat16: convert with float32(), or share by DLPack")
        return self._bits(_NUMPY[self._dtype])

    def float32(self) -> np.ndarray:
        """Returns the values as a numpy array of float32, which is a copy for bfloat16."""
        if self._dtype != BF16:
            return self.numpy().astype(np.float32, copy=False)
        return (self._bits(np.dtype(np.uint16)).astype(np.uint32) << 16).view(np.float32)

    def _bits(self, dtype: np.dtype) -> np.ndarray:
        if self._device.kind == "cpu":
            return _numpy_of(self._pointer, self._shape, dtype, self)
        host = np.empty(self._shape, dtype)
        check(library.switchyard_copy_out(
            self._device._handle, self._device._stream, ctypes.c_void_p(self._pointer),
            ctypes.c_void_p(host.ctypes.data), ctypes.c_int64(host.nbytes)))
        return host

    def __dlpack_device__(self) -> Tuple[int, int]:
        kind = _dlpack.CPU if self._device.kind == "cpu" else _dlpack.CUDA
        return kind, self._device.ordinal

    def __dlpack__(self, *, stream: Optional[int] = None, max_version: Any = None,
                   dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        if copy:
            raise BufferError("an Array is always shared: copy=True is not supported")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on {self.__dlpack_device__()}, not on {dl_device}")
        ours = self._device._stream.value
        if self._device.kind == "cuda" and stream != -1 and (stream or 1) != ours:
            self._device.synchronize()  # the consumer's stream does not wait for ours
        code, bits = _DLPACK_CODES[self._dtype]
        return _dlpack.make(self._pointer, self.__dlpack_device__(), code, bits, self._shape, self)

    def __repr__(self) -> str:
        return f"Array({self.dtype} {list(self._shape)} on {self._device!r})"


AnyArray = Any  # a numpy array, an Array, or anything with __dlpack__
Result = Union[np.ndarray, Array]


def _num_elements(shape: Sequence[int]) -> int:
    number = 1
    for extent in shape:
        number *= extent
    return number


def _numpy_of(pointer: int, shape: Tuple[int, ...], dtype: np.dtype, owner: Any) -> np.ndarray:
    """Returns a numpy array over foreign memory that keeps the owner alive."""
    if _num_elements(shape) == 0:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (_num_elements(shape) * dtype.itemsize)).from_address(pointer)
    memory._owner = owner  # the buffer, which numpy keeps alive
    return np.frombuffer(memory, dtype).reshape(shape)


def _dtype_of(array: np.ndarray, name: str) -> int:
    kind = array.dtype.name  # "bfloat16" comes from ml_dtypes
    if not array.dtype.isnative or kind not in NAMES[:4]:
        raise InvalidArgument(f"{name} is {array.dtype}, but must be one of {', '.join(NAMES[:4])}")
    return NAMES.index(kind)


def _view_of_numpy(array: np.ndarray, name: str, writable: bool) -> View:
    dtype = _dtype_of(array, name)
    if not array.flags.c_contiguous:
        if writable:
            raise InvalidArgument(f"{name} {list(array.shape)} is not contiguous, so nothing can "
                                  "be written to it")
        array = np.ascontiguousarray(array)
    return View(array.ctypes.data, array.shape, dtype, ("cpu", 0), not array.flags.writeable, array)


def _capsule_of(value: Any, place: Place, stream: int) -> Any:
    # On a GPU the producer makes our stream wait for its own.
    ours = {"stream": stream} if place[0] == "cuda" else {}
    try:
        return value.__dlpack__(max_version=(1, 0), **ours)
    except TypeError:  # a producer older than DLPack 1.0
        return value.__dlpack__(**ours)


def _view_of_dlpack(value: Any, name: str, writable: bool, stream: int) -> View:
    kind, ordinal = map(int, value.__dlpack_device__())
    if kind in (_dlpack.CPU, _dlpack.CUDA_HOST):
        place = ("cpu", 0)
    elif kind in (_dlpack.CUDA, _dlpack.CUDA_MANAGED):
        place = ("cuda", ordinal)
    else:
        raise Unsupported(f"{name} is on a device of DLPack's kind {kind}, but must be on a CPU "
                          "or a CUDA GPU")
    capsule = _capsule_of(value, place, stream)
    tensor = _dlpack.read(capsule)
    if (tensor.code, tensor.bits) not in _DLPACK_CODES[:4]:
        raise InvalidArgument(f"{name} has DLPack's dtype {tensor.code} of {tensor.bits} bits, but "
                              f"must be one of {', '.join(NAMES[:4])}")
    dtype = _DLPACK_CODES.index((tensor.code, tensor.bits))
    if _is_contiguous(tensor.shape, tensor.strides):
        return View(tensor.pointer, tensor.shape, dtype, place, tensor.read_only, capsule)
    if writable or place[0] != "cpu":
        raise InvalidArgument(f"{name} {list(tensor.shape)} has strides {list(tensor.strides)}, "
                              "but must be contiguous")
    return _packed(tensor, dtype)


def _is_contiguous(shape: Tuple[int, ...], strides: Tuple[int, ...]) -> bool:
    if _num_elements(shape) == 0:
        return True
    wanted = _dlpack.contiguous_strides(shape)
    return all(extent == 1 or is_ == want for extent, is_, want in zip(shape, strides, wanted))


def _packed(tensor: _dlpack.Tensor, dtype: int) -> View:
    """Returns a contiguous copy of memory on a CPU."""
    size = _SIZES[dtype]
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides))
    bits = np.dtype(f"u{size}")
    memory = (ctypes.c_char * ((last + 1) * size)).from_address(tensor.pointer)
    strided = np.lib.stride_tricks.as_strided(np.frombuffer(memory, bits), tensor.shape,
                                              [stride * size for stride in tensor.strides])
    copy = np.ascontiguousarray(strided)
    return View(copy.ctypes.data, tensor.shape, dtype, ("cpu", 0), False, copy)


def view(value: AnyArray, name: str, *, writable: bool = False,
         stream: int = DEFAULT_STREAM) -> View:
    """Returns a view of an array, or of a contiguous copy if it is a strided array on a CPU."""
    if isinstance(value, Array):
        result = View(value._pointer, value._shape, value._dtype, value._device.place, False, value)
    elif isinstance(value, np.ndarray):
        result = _view_of_numpy(value, name, writable)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        result = _view_of_dlpack(value, name, writable, stream)
    elif hasattr(value, "__array_interface__"):
        result = _view_of_numpy(np.asarray(value), name, writable)
    else:
        raise InvalidArgument(f"{name} is a {type(value).__name__}, but must be an array of numpy "
                              "or one with __dlpack__")
    if writable and result.read_only:
        raise InvalidArgument(f"{name} {list(result.shape)} is read-only")
    if not 1 <= len(result.shape) <= 4:
        raise InvalidArgument(f"{name} is {list(result.shape)}, but must have 1 to 4 extents")
    return result


def view_on(device: Device, value: AnyArray, name: str, *, writable: bool = False) -> View:
    """Like view(), but raises unless the array is in the device's memory."""
    result = view(value, name, writable=writable,
                  stream=device._stream.value or DEFAULT_STREAM)
    if result.place != device.place:
        raise InvalidArgument(f"{name} is on {result.place[0]}:{result.place[1]}, but the call "
                              f"computes on {device.kind}:{device.ordinal}")
    return result


def require_form(view_: View, name: str, dtypes: Sequence[int],
                 shape: Sequence[Optional[int]], letters: str) -> None:
    """Raises if an array has another dtype or shape. None stands for any extent."""
    fits = len(view_.shape) == len(shape) and all(
        wanted is None or wanted == extent for wanted, extent in zip(shape, view_.shape))
    if view_.dtype not in dtypes or not fits:
        wanted = ",".join(letter if extent is None else str(extent)
                          for letter, extent in zip(letters, shape))
        raise InvalidArgument(f"{name} is {NAMES[view_.dtype]} {list(view_.shape)}, but must be "
                              f"{' or '.join(NAMES[d] for d in dtypes)} [{wanted}]")


def empty(device: Device, shape: Sequence[int], dtype: int) -> Tuple[Result, View]:
    """Allocates a result: a numpy array, or an Array for anything that numpy does not support."""
    shape = tuple(int(extent) for extent in shape)
    if device.kind == "cpu" and _NUMPY[dtype] is not None:
        result: Result = np.empty(shape, _NUMPY[dtype])
        return result, View(result.ctypes.data, shape, dtype, device.place, False, result)
    if device.kind == "cpu":
        bits = np.empty(shape, np.uint16)
        result = Array(bits.ctypes.data, shape, dtype, device, bits)
    else:
        result = _on_gpu(device, shape, dtype)
    return result, View(result._pointer, shape, dtype, device.place, False, result)


def _free(buffer: ctypes.c_void_p, _device: Device) -> None:
    library.switchyard_buffer_free(buffer)


def _on_gpu(device: Device, shape: Tuple[int, ...], dtype: int) -> Array:
    buffer, data = ctypes.c_void_p(), ctypes.c_void_p()
    check(library.switchyard_buffer_make(
        device._handle, device._stream, ctypes.c_int64(_num_elements(shape) * _SIZES[dtype]),
        ctypes.byref(buffer), ctypes.byref(data)))
    array = Array(data.value or 0, shape, dtype, device, None)
    weakref.finalize(array, _free, buffer, device)  # keeps the device alive until then
    return array


def zeros_like(device: Device, like: View) -> Tuple[Result, View]:
    """Like empty(), but filled with zeros."""
    result, memory = empty(device, like.shape, like.dtype)
    size = _num_elements(like.shape) * _SIZES[like.dtype]
    if device.kind == "cpu":
        ctypes.memset(memory.pointer, 0, size)
    else:
        _copy_in(device, np.zeros(size, np.uint8), memory)
    return result, memory


def _copy_in(device: Device, host: np.ndarray, memory: View) -> None:
    check(library.switchyard_copy_in(
        device._handle, device._stream, ctypes.c_void_p(host.ctypes.data),
        ctypes.c_void_p(memory.pointer), ctypes.c_int64(host.nbytes)))


def put(array: AnyArray, device: Device) -> Result:
    """Copies an array from a CPU to the memory of a device. Waits for the copy."""
    source = view(array, "array")
    if source.place[0] != "cpu":
        raise InvalidArgument(f"array is on {source.place[0]}:{source.place[1]}, but must be on a "
                              "CPU")
    result, memory = empty(device, source.shape, source.dtype)
    size = _num_elements(source.shape) * _SIZES[source.dtype]
    if device.kind == "cpu":
        ctypes.memmove(memory.pointer, source.pointer, size)
    elif size:
        host = (ctypes.c_char * size).from_address(source.pointer)
        _copy_in(device, np.frombuffer(host, np.uint8), memory)
    return result


def bfloat16(values: Any) -> Array:
    """Returns an Array of bfloat16 on the CPU, with the values rounded to nearest even."""
    floats = np.ascontiguousarray(values, np.float32)
    bits = floats.view(np.uint32).reshape(floats.shape)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = (bits >> 16).astype(np.uint16) | np.uint16(0x40)  # a NaN stays a NaN
    halves = np.ascontiguousarray(np.where(np.isnan(floats), quiet, rounded))
    return Array(halves.ctypes.data, halves.shape, BF16, default_device(), halves)
