# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that some ranks save and others load."""
import json
import struct

import numpy as np
import pytest

import switchyard as sy

H, I, E, K = 8, 6, 6, 2
PREFIX = "model.layers.3.mlp."
FORM = dict(hidden=H, intermediate=I, num_experts=E, top_k=K)


def draw_weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return sy.MoeWeights(gate=draw(E, H), gate_up=draw(E, 2 * I, H), down=draw(E, H, I))


def part(weights, experts):
    return sy.MoeWeights(weights.gate, weights.gate_up[experts], weights.down[experts])


def save(path, num_ranks, weights, **options):
    placement = sy.ExpertPlacement.contiguous(E, num_ranks)

    def rank(comm):
        block = sy.CheckpointBlock(PREFIX, part(weights, placement.experts_of(comm.rank)),
                                   placement, comm.rank)
        sy.save_checkpoint(comm, path, blocks=[block], metadata={"step": "7"},
                           tensors={"norm.weight": np.arange(H, dtype=np.float32),
                                    "steps": np.int64([[1, 2], [3, 4]]),
                                    "scale": sy.bfloat16([[1.5, -2.0]])}, **options)

    sy.run_ranks(num_ranks, rank)


@pytest.mark.parametrize("file_per_rank", [False, True])
def test_what_four_ranks_save_two_load(tmp_path, file_per_rank):
    weights = draw_weights()
    path = tmp_path / ("checkpoint" if file_per_rank else "checkpoint.safetensors")
    save(path, 4, weights, file_per_rank=file_per_rank)
    owners = sy.ExpertPlacement([1, 0, 0, 1, 0, 1], 2)

    def rank(comm):
        layer = sy.MoeLayer(comm, placement=owners, **FORM)
        mine = layer.zeros()
        sy.load_checkpoint(path).load_block(PREFIX, owners, comm.rank, mine)
        own = owners.experts_of(comm.rank)
        assert np.array_equal(mine.gate, weights.gate)
        assert np.array_equal(mine.gate_up, weights.gate_up[own])
        assert np.array_equal(mine.down, weights.down[own])
        return layer.forward(mine, np.ones((3, H), np.float32))

    ys = sy.run_ranks(2, rank)
    alone = sy.MoeLayer(sy.connect(), **FORM)
    wanted = alone.forward(weights, np.ones((3, H), np.float32))
    assert np.array_equal(ys[0], wanted) and np.array_equal(ys[1], wanted)


def test_contents(tmp_path):
    path = tmp_path / "one.safetensors"
    save(path, 2, draw_weights())
    header = sy.read_header(path)
    assert header["scale"] == sy.TensorInfo("BF16", (1, 2), 4, True, "one.safetensors")
    assert header[f"{PREFIX}experts.gate_up_proj"].shape == (E, 2 * I, H)
    with sy.Checkpoint(path) as checkpoint:
        assert checkpoint.metadata["step"] == "7" and "steps" in checkpoint
        assert checkpoint.names(PREFIX) == sorted(n for n in header if n.startswith(PREFIX))
        assert checkpoint.read("steps").tolist() == [[1, 2], [3, 4]]
        assert checkpoint.read("scale").float32().tolist() == [[1.5, -2.0]]
        wide = np.zeros((1, 2), np.float32)
        checkpoint.load_tensor("scale", wide)
        assert wide.tolist() == [[1.5, -2.0]]
    with pytest.raises(sy.InvalidArgument, match="this checkpoint is closed"):
        checkpoint.read("steps")


def test_layers_widen_when_they_load(tmp_path):
    weights = draw_weights()
    halves = sy.MoeWeights(**{name: None if array is None else sy.bfloat16(array)
                              for name, array in vars(weights).items()})
    placement = sy.ExpertPlacement.contiguous(E, 1)
    comm = sy.connect()
    sy.save_checkpoint(comm, tmp_path / "bf16.safetensors",
                       blocks=[sy.CheckpointBlock("", halves, placement, 0)])
    loaded = sy.MoeLayer(comm, **FORM).zeros()
    sy.load_checkpoint(tmp_path / "bf16.safetensors").load_block("", placement, 0, loaded)
    assert np.array_equal(loaded.gate_up, halves.gate_up.float32())


def test_unreadable_dtypes_are_listed_and_others_are_read(tmp_path):
    path = tmp_path / "f8.safetensors"
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]},
                         "b": {"dtype": "F16", "shape": [], "data_offsets": [4, 6]}}).encode()
    path.write_bytes(struct.pack("<q", len(header)) + header + bytes(4) + b"\x00\x3c")
    with sy.Checkpoint(path) as checkpoint:
        assert not checkpoint["a"].is_readable
        assert checkpoint.read("b").dtype == np.float16 and checkpoint.read("b")[0] == 1
        with pytest.raises(sy.Unsupported, match="a is F8_E4M3"):
            checkpoint.read("a")
        with pytest.raises(sy.InvalidArgument, match="there is no tensor c"):
            checkpoint.read("c")


def test_errors(tmp_path):
    weights = draw_weights()
    path = tmp_path / "checkpoint.safetensors"
    save(path, 2, weights)
    checkpoint = sy.Checkpoint(path)
    placement = sy.ExpertPlacement.contiguous(E, 2)
    small = sy.MoeLayer(sy.connect(), hidden=H, intermediate=4, num_experts=3, top_k=1).zeros()
    whole = sy.MoeLayer(sy.connect(), **FORM).zeros()
    calls = {
        "gate": lambda: checkpoint.load_block(PREFIX, placement, 0, small),
        "there is no tensor": lambda: checkpoint.load_block("other.", placement, 0, whole),
        r"rank \(2\)": lambda: checkpoint.load_block(PREFIX, placement, 2, whole),
        "into": lambda: checkpoint.load_tensor("steps", "no array"),
        "norm.weight": lambda: checkpoint.load_tensor("norm.weight", np.zeros(3, np.float32)),
        "cannot|no such": lambda: sy.Checkpoint(tmp_path / "nowhere"),
        "save_checkpoint|missing|experts": lambda: sy.save_checkpoint(
            sy.connect(), tmp_path / "half.safetensors",
            blocks=[sy.CheckpointBlock("", part(weights, [0, 1, 2]), placement, 0)]),
    }
    for message, call in calls.items():
        with pytest.raises(sy.InvalidArgument, match=message):
            call()
    with pytest.raises(sy.StorageError):
        sy.save_checkpoint(sy.connect(), tmp_path / "no" / "folder.safetensors",
                           tensors={"a": np.zeros(1, np.float32)})
    assert not (tmp_path / "half.safetensors").exists()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(sy.InvalidArgument):
        sy.Checkpoint(broken)


def test_a_rank_that_cannot_save_tells_the_others(tmp_path):
    def rank(comm):
        bad = comm.rank == 1
        sy.save_checkpoint(comm, tmp_path / "a.safetensors",
                           tensors={"a": [1] if bad else np.zeros(1, np.float32)})

    with pytest.raises(sy.InvalidArgument, match="a is a list"):
        sy.run_ranks(3, rank)
    assert list(tmp_path.iterdir()) == []
