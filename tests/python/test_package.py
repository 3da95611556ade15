# SPDX-License-Identifier: Apache-2.0
"""The package itself: its version, what its import needs, and its errors."""
import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import switchyard
from switchyard._library import check, library

SOURCE = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(switchyard.__file__).parent


def run(program, **environment):
    """Runs a program in a Python of its own; an environment variable that is None is left out."""
    merged = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          timeout=300, check=False,
                          env={name: value for name, value in merged.items() if value is not None})


def test_version_is_that_of_cmake():
    project = re.search(r"project\(switchyard VERSION ([0-9.]+)",
                        (SOURCE / "CMakeLists.txt").read_text())
    assert switchyard.__version__ == project[1]


def test_types_are_declared():
    assert (PACKAGE / "py.typed").exists()


def test_import_needs_no_torch():
    result = run("import sys; sys.modules['torch'] = None\n"
                 "import switchyard; print(switchyard.__version__)")
    assert (result.stdout.strip(), result.stderr) == (switchyard.__version__, "")


# A product by torch and a layer by the library, on two threads each, so that both of the OpenMP
# runtimes in the process are at work.
_LAYER = """
torch.set_num_threads(2)
torch.manual_seed(0)
x, gate_up, down = torch.randn(64, 32), torch.randn(4, 96, 32), torch.randn(4, 32, 48)
ids, weights = torch.randn(64, 4).topk(2)[1], torch.rand(64, 2)
y = switchyard.torch.moe(switchyard.torch.plan(ids, 4), x, weights, gate_up, down)
gates, ups = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=2)
outs = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gates) * ups, down)
picked = outs.gather(1, ids[:, :, None].expand(-1, -1, 32))
torch.testing.assert_close(y, (weights[:, :, None] * picked).sum(1), rtol=1e-4, atol=1e-3)
a, b = torch.randn(300, 300), torch.randn(300, 300)
torch.testing.assert_close((a @ b).double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
y = switchyard.torch.moe(switchyard.torch.plan(ids, 4), x, weights, gate_up, down)
print(float(y.abs().sum()))
"""


def test_both_orders_of_imports_work_alike():
    orders = ["import torch, switchyard.torch", "import switchyard, torch, switchyard.torch"]
    results = [run(order + _LAYER) for order in orders]
    assert [result.returncode for result in results] == [0, 0], [r.stderr for r in results]
    assert results[0].stdout == results[1].stdout


def test_errors_are_pythons_too():
    device = ctypes.c_void_p()
    with pytest.raises(ValueError, match=r"num_threads \(0\) must be 1 to 4096") as caught:
        check(library.switchyard_device_cpu(ctypes.c_int64(0), ctypes.byref(device)))
    assert isinstance(caught.value, switchyard.InvalidArgument)
    with pytest.raises(NotImplementedError, match="GPU 1000 cannot be used") as caught:
        check(library.switchyard_device_cuda(ctypes.c_int64(1000), ctypes.c_int64(0), None, None,
                                             ctypes.byref(device)))
    assert isinstance(caught.value, switchyard.Unsupported)


@pytest.mark.parametrize("kind, ours, pythons", [
    (1, switchyard.InvalidArgument, ValueError),
    (2, switchyard.Unsupported, NotImplementedError),
    (3, switchyard.CommunicationError, ConnectionError),
    (4, switchyard.StorageError, OSError),
    (5, switchyard.DeviceError, RuntimeError),
    (6, switchyard.InternalError, RuntimeError),
    (7, switchyard.Error, MemoryError),
    (8, switchyard.Error, RuntimeError),
])
def test_every_kind_of_error_has_an_exception(kind, ours, pythons):
    device = ctypes.c_void_p()
    assert library.switchyard_device_cpu(ctypes.c_int64(-5), ctypes.byref(device)) == 1
    with pytest.raises(ours, match=r"^num_threads \(-5\) must be 1 to 4096$") as caught:
        check(kind)
    assert isinstance(caught.value, pythons)


def test_a_package_without_its_library_says_what_to_do(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "switchyard", ignore=shutil.ignore_patterns("*.so"))
    result = run("import switchyard", PYTHONPATH=str(tmp_path), SWITCHYARD_LIBRARY=None)
    assert re.search(r"ImportError: there is no .*/switchyard/libswitchyard\.so: install the "
                     r"package \(pip install \.\), or let SWITCHYARD_LIBRARY name", result.stderr)


def test_a_named_library_that_is_missing_is_an_error(tmp_path):
    missing = tmp_path / "libswitchyard.so"
    result = run("import switchyard", SWITCHYARD_LIBRARY=str(missing))
    assert f"ImportError: there is no {missing}: SWITCHYARD_LIBRARY must name a libswitchyard.so" in result.stderr
