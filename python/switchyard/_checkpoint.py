# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: named tensors in safetensors files that any number of ranks can save and load."""
from __future__ import annotations

import ctypes
import json
import os
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ._arrays import AnyArray, Result, empty, view, view_on
from ._device import Device, default_device
from ._handles import Handle
from ._layer import MoeWeights, pack_weights
from ._library import InvalidArgument, Unsupported, check, library, words
from ._ranks import Communicator, ExpertPlacement

_DTYPES = {"F32": 0, "BF16": 1, "I32": 2, "I64": 3, "F16": 4}
Path = Union[str, "os.PathLike[str]"]


class TensorInfo(NamedTuple):
    """A tensor as its file describes it."""
    dtype: str  # as written in the file: "BF16", "F8_E4M3"
    shape: Tuple[int, ...]
    nbytes: int
    is_readable: bool
    file: str


class Checkpoint(Mapping[str, TensorInfo]):
    """A safetensors file, an index of several, or a folder of them, as a mapping by tensor name.

    Opening it checks that it is complete. Files are mapped, so only tensors that are read are
    loaded.
    """

    def __init__(self, path: Path):
        pointer, text = ctypes.c_void_p(), ctypes.c_char_p()
        check(library.switchyard_checkpoint_open(os.fsencode(path), ctypes.byref(pointer)))
        self._handle = Handle(pointer, library.switchyard_checkpoint_free, "checkpoint")
        check(library.switchyard_checkpoint_contents(pointer, ctypes.byref(text)))
        contents = json.loads(text.value)
        self.path = os.fspath(path)
        self.metadata: Dict[str, str] = contents["metadata"]
        self._tensors = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), entry["bytes"],
                             entry["readable"], entry["file"])
            for name, entry in contents["tensors"].items()}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self, prefix: str = "") -> List[str]:
        """Returns the names that begin with `prefix`, in ascending order."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def read(self, name: str) -> Result:
        """Returns a copy of a tensor in the file's dtype. bf16 is an Array, and a scalar is [1]."""
        info = self._tensors.get(name)
        if info is None:
            raise InvalidArgument(f"there is no tensor {name} in {self.path}")
        if info.dtype not in _DTYPES:
            raise Unsupported(f"{name} is {info.dtype}, but only {', '.join(_DTYPES)} can be read")
        result, memory = empty(default_device(), info.shape or (1,), _DTYPES[info.dtype])
        with self._handle as pointer:
            check(library.switchyard_checkpoint_read(pointer, name.encode(),
                                                     ctypes.c_void_p(memory.pointer),
                                                     ctypes.c_int64(result.nbytes)))
        return result

    def load_tensor(self, name: str, into: AnyArray, *, device: Optional[Device] = None) -> None:
        """Copies a whole tensor into an array of its shape; bf16 and f16 widen to f32. Waits."""
        target = view(into, "into", writable=True)
        device = device or default_device(target.place)
        view_on(device, into, "into")
        with self._handle as pointer:
            check(library.switchyard_checkpoint_load_tensor(
                pointer, device._handle, device._stream, name.encode(), target.pack))

    def load_block(self, prefix: str, placement: ExpertPlacement, rank: int, into: MoeWeights, *,
                   device: Optional[Device] = None) -> None:
        """Copies a rank's part of the MoE block under `prefix`, such as "model.layers.3.mlp.", into
        arrays, such as those of MoeLayer.zeros(). The number of ranks that saved it does not
        matter. Names are those of Hugging Face Transformers. A tensor that does not fit, or that
        only one side has, raises InvalidArgument before anything is written. Not collective;
        waits."""
        if device is None:
            place = view(into.gate_up, "gate_up").place if into.gate_up is not None else ("cpu", 0)
            device = default_device(place)
        views = into.views(device, writable=True)
        with self._handle as pointer:
            check(library.switchyard_checkpoint_load_block(
                pointer, device._handle, device._stream, prefix.encode(), placement.pack,
                ctypes.c_int64(rank), pack_weights(views)))

    def close(self) -> None:
        """Unmaps the files. Arrays that were read stay valid."""
        self._handle.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_error: Any) -> None:
        self.close()


def load_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint. Its tensors are read on request."""
    return Checkpoint(path)


def read_header(path: Path) -> Dict[str, TensorInfo]:
    """Returns the tensors of a safetensors file or a whole checkpoint: names, dtypes and shapes."""
    with Checkpoint(path) as checkpoint:
        return dict(checkpoint)


class CheckpointBlock(NamedTuple):
    """One rank's part of an MoE layer, or of the optimizer state of one."""
    prefix: str  # "model.layers.3.mlp."
    weights: MoeWeights
    placement: ExpertPlacement
    rank: int  # in the placement


class _Packed:
    """The structs of a save call, and the memory that they point to."""

    def __init__(self, device: Device, tensors: Mapping[str, AnyArray],
                 blocks: Sequence[CheckpointBlock], metadata: Mapping[str, str]):
        self._kept: List[Any] = []
        self.tensors = b"".join(
            words(self._text(name)) + self._keep(view_on(device, array, name)).pack
            for name, array in tensors.items())
        self.blocks = b"".join(self._block(device, block) for block in blocks)
        self.metadata = words(*(self._text(str(text)) for pair in metadata.items()
                                for text in pair))

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _text(self, text: str) -> int:
        return ctypes.addressof(self._keep(ctypes.create_string_buffer(text.encode())))

    def _block(self, device: Device, block: CheckpointBlock) -> bytes:
        views = self._keep(block.weights.views(device))
        self._keep(block.placement)
        return (words(self._text(block.prefix), *block.placement.words, int(block.rank)) +
                pack_weights(views))

    def address(self, packed: bytes) -> int:
        return ctypes.addressof(self._keep(ctypes.create_string_buffer(packed, len(packed) or 1)))


def save_checkpoint(comm: Communicator, path: Path, *,
                    tensors: Optional[Mapping[str, AnyArray]] = None,
                    blocks: Sequence[CheckpointBlock] = (),
                    metadata: Optional[Mapping[str, str]] = None, file_per_rank: bool = False,
                    device: Optional[Device] = None) -> None:
    """Saves tensors and MoE blocks. Collective over ranks that share a file system.

    Every rank that lists a tensor in `tensors` holds all of it. `path` becomes a safetensors file,
    or with `file_per_rank` a folder of files and an index. Nothing appears there before everything
    is on disk. If something cannot be saved, every rank raises the same InvalidArgument or
    StorageError.
    """
    device = device or default_device()
    tensors, metadata = tensors or {}, metadata or {}
    try:
        packed = _Packed(device, tensors, blocks, metadata)
        form = words(packed.address(packed.tensors), len(tensors), packed.address(packed.blocks),
                     len(blocks), packed.address(packed.metadata), len(metadata),
                     int(file_per_rank))
    except Exception as error:
        comm._tell("save_checkpoint", error)
        raise
    with comm._handle as pointer:
        check(library.switchyard_checkpoint_save(pointer, device._handle, device._stream,
                                                 os.fsencode(path), form))
