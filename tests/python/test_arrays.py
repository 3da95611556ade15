# SPDX-License-Identifier: Apache-2.0
"""Arrays that come from numpy and DLPack, and those that go back."""
import ctypes
import gc

import numpy as np
import pytest

import switchyard as sy
from switchyard import _arrays, _dlpack

torch = pytest.importorskip("torch")


def read(view, dtype):
    memory = (ctypes.c_char * (int(np.prod(view.shape)) * np.dtype(dtype).itemsize)).from_address(
        view.pointer)
    return np.frombuffer(memory, dtype).reshape(view.shape)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_numpy_is_taken_where_it_lies(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    view = _arrays.view(array, "x")
    assert view.pointer == array.ctypes.data
    assert view.shape == (3, 4) and _arrays.NAMES[view.dtype] == dtype
    assert view.place == ("cpu", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_torch_is_taken_where_it_lies(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    view = _arrays.view(tensor, "x")
    assert view.pointer == tensor.data_ptr()
    assert f"torch.{_arrays.NAMES[view.dtype]}" == str(dtype)


def test_arrays_that_are_not_contiguous_are_copied():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(read(_arrays.view(array.T, "x"), np.float32), array.T)
    assert np.array_equal(read(_arrays.view(array[:, 1:3], "x"), np.float32), array[:, 1:3])
    tensor = torch.from_numpy(array)[:, 1:3]
    assert np.array_equal(read(_arrays.view(tensor, "x"), np.float32), array[:, 1:3])
    halves = torch.from_numpy(array).bfloat16()
    copy = read(_arrays.view(halves.t(), "x"), np.int16)
    assert np.array_equal(copy, halves.t().contiguous().view(torch.int16).numpy())


def test_a_view_keeps_its_array():
    view = _arrays.view(torch.arange(1000, dtype=torch.float32), "x")
    gc.collect()
    assert read(view, np.float32)[999] == 999


def test_bfloat16_rounds_to_nearest_even():
    values = np.random.default_rng(1).standard_normal(10000).astype(np.float32)
    values[:6] = [np.inf, -np.inf, 0.0, -0.0, np.nan, 3.4e38]
    ours = torch.from_dlpack(sy.bfloat16(values))
    theirs = torch.from_numpy(values).bfloat16()
    assert ours.dtype == torch.bfloat16
    assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))
    widened = sy.bfloat16(values).float32()
    assert np.array_equal(widened, theirs.float().numpy(), equal_nan=True)


def test_an_array_reaches_torch_and_numpy_without_a_copy():
    array = sy.bfloat16(np.ones((2, 3)))
    torch.from_dlpack(array)[0, 0] = 5
    assert array.float32()[0, 0] == 5
    assert (array.shape, array.dtype, array.ndim, array.nbytes) == ((2, 3), "bfloat16", 2, 12)
    assert array.__dlpack_device__() == (1, 0)
    floats, view = _arrays.empty(sy.Device("cpu", threads=1), (4,), _arrays.F32)
    shared = _arrays.Array(view.pointer, (4,), _arrays.F32, sy.Device("cpu", threads=1), floats)
    np.from_dlpack(shared)
    floats[:] = [1, 2, 3, 4]
    assert np.array_equal(np.from_dlpack(shared), floats)
    assert np.array_equal(shared.numpy(), floats)


def test_capsules_end_with_their_consumers():
    before = len(_dlpack._exported)
    array = sy.bfloat16(np.arange(8.0))
    capsule = array.__dlpack__()
    tensor = torch.from_dlpack(array)
    assert len(_dlpack._exported) == before + 2
    del capsule, array
    gc.collect()
    assert len(_dlpack._exported) == before + 1
    assert tensor[7] == 7
    del tensor
    gc.collect()
    assert len(_dlpack._exported) == before


def test_unsupported_arrays_are_refused():
    with pytest.raises(sy.InvalidArgument, match="x is a list, but must be an array"):
        _arrays.view([1.0], "x")
    with pytest.raises(sy.InvalidArgument, match="x is float64, but must be one of float32"):
        _arrays.view(np.zeros(3), "x")
    with pytest.raises(sy.InvalidArgument, match="of 64 bits"):
        _arrays.view(torch.zeros(3, dtype=torch.float64), "x")
    with pytest.raises(sy.InvalidArgument, match="must have 1 to 4 extents"):
        _arrays.view(np.zeros((), np.float32), "x")
    read_only = np.zeros(3, np.float32)
    read_only.flags.writeable = False
    _arrays.view(read_only, "x")
    with pytest.raises(sy.InvalidArgument, match=r"x \[3\] is read-only"):
        _arrays.view(read_only, "x", writable=True)
    with pytest.raises(sy.InvalidArgument, match="is not contiguous"):
        _arrays.view(np.zeros((2, 3), np.float32).T, "x", writable=True)
    with pytest.raises(sy.Unsupported, match="numpy has no bfloat16"):
        sy.bfloat16([1.0]).numpy()
    with pytest.raises(BufferError, match="copy=True"):
        sy.bfloat16([1.0]).__dlpack__(copy=True)


def test_devices_say_what_they_cannot_do():
    with pytest.raises(sy.InvalidArgument, match="kind is 'tpu'"):
        sy.Device("tpu")
    with pytest.raises(sy.InvalidArgument, match=r"num_threads \(0\)"):
        sy.Device("cpu", threads=0)
    assert repr(sy.Device("cpu", threads=2)) == "Device('cpu', threads=2)"
