"""Whole models of transformers with their experts over ranks, beside one process."""
import copy
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import switchyard.torch as st
from switchyard import InvalidArgument

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hugging_face"))
from tiny_models import VOCABULARY, build_model  # noqa: E402

# The numbers of experts are 7 and 8: over 4 ranks 2, 2, 2, 1 of 7.
FAMILIES = ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"]


def batches(count, length=6, rows=2):
    random = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCABULARY, (count, rows, length), generator=random)


def mesh_of(group, name="ep"):
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def assert_close(ours, theirs, name, tolerance=1e-5):
    error = torch.linalg.vector_norm((ours - theirs).double())
    norm = torch.linalg.vector_norm(theirs.double())
    assert error <= tolerance * norm + 1e-9, f"{name}: off by {error / norm:.2e}"


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare_with_one_process(group, family):
    model = build_model(family)
    alone = copy.deepcopy(model)
    tokens = batches(group.size())
    losses = [alone(batch, labels=batch).loss for batch in tokens]
    torch.stack(losses).mean().backward()

    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.shape for p in model.parameters()] == shapes
    own = tokens[group.rank()]
    out = model(own, labels=own)
    assert_close(out.logits, alone(own).logits, "logits", 1e-6)
    assert_close(out.loss, losses[group.rank()], "loss", 1e-6)
    out.loss.backward()
    st.reduce_gradients(model)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert_close(whole(ours.grad), theirs.grad, name)
    norm = st.clip_grad_norm_(model, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    assert_close(norm, expected, "norm")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_one_process(workers, family, size):
    workers.run(size, compare_with_one_process, family)
