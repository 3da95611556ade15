# SPDX-License-Identifier: Apache-2.0
"""The shared library behind the package, through its C interface (include/switchyard/c)."""
import ctypes
import os
import pathlib
import struct

__all__ = ["Error", "InvalidArgument", "Unsupported", "CommunicationError", "StorageError",
           "DeviceError", "InternalError", "library", "check", "words"]


class Error(RuntimeError):
    """An error of the library; its text names the values involved."""


class InvalidArgument(Error, ValueError):
    """The caller passed something the contract does not allow."""


class Unsupported(Error, NotImplementedError):
    """This build, device or machine cannot serve a sound request."""


class CommunicationError(Error, ConnectionError):
    """A collective could not be completed; its communicator is unusable afterwards."""


class StorageError(Error, OSError):
    """A file could not be written."""


class DeviceError(Error):
    """A device, its driver or its memory failed."""


class InternalError(Error):
    """An invariant of the library is broken: please report it."""


class _OutOfMemory(Error, MemoryError):
    """The host has no more memory."""


_KINDS = {1: InvalidArgument, 2: Unsupported, 3: CommunicationError, 4: StorageError,
          5: DeviceError, 6: InternalError, 7: _OutOfMemory}


def _find():
    """Returns SWITCHYARD_LIBRARY, or the library that comes with the package."""
    named = os.environ.get("SWITCHYARD_LIBRARY")
    path = pathlib.Path(named) if named else pathlib.Path(__file__).parent / "libswitchyard.so"
    if not path.exists():
        raise ImportError(
            f"there is no {path}: " +
            ("SWITCHYARD_LIBRARY must name a libswitchyard.so" if named else
             "install the package (pip install .), or let SWITCHYARD_LIBRARY name "
             "a libswitchyard.so that was built with CMake"))
    return path


def _load():
    # Deep binding, because torch exports other versions of symbols from libraries that this one
    # uses.
    library = ctypes.CDLL(os.fspath(_find()), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    library.switchyard_version.restype = ctypes.c_char_p
    library.switchyard_last_error.restype = ctypes.c_char_p
    for name in ("plan_words", "plan_most_rows", "inner_width", "device_host_syncs",
                 "device_bytes_held"):
        getattr(library, f"switchyard_{name}").restype = ctypes.c_int64
    return library


library = _load()


def _last_error():
    return library.switchyard_last_error().decode(errors="replace")


def check(result):
    """Raises the error that a library call reports."""
    if result != 0:
        raise _KINDS.get(result, Error)(_last_error())


def checked(number):
    """Returns a number from the library. Raises if it is negative, which reports an error."""
    if number < 0:
        raise InvalidArgument(_last_error())
    return number


def words(*values):
    """Returns a struct of the C interface, whose fields are integers or floats of 8 bytes each."""
    return struct.pack("".join("d" if isinstance(v, float) else "q" for v in values), *values)
