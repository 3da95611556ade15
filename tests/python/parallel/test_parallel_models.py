# SPDX-License-Identifier: Apache-2.0
"""Whole models of transformers with their experts over ranks, beside one process."""
import copy
import gc
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


def train(model, optimizer, tokens, steps, reduce):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = tokens[step]
        loss = model(batch, labels=batch).loss
        loss.backward()
        reduce()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_alone(tokens, steps):
    """One process that has the batches of all ranks: tokens [steps, ranks, …]."""
    model = build_model("Qwen3Moe", num_experts=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([model(b, labels=b).loss for b in tokens[step]]).mean().backward()
        optimizer.step()
    return model, optimizer


def sharded_model(group, dp, ep, **options):
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    model = build_model("Qwen3Moe", num_experts=8)
    st.apply_expert_parallel(model, mesh["ep"], timeout=60, **options)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, mesh


def compare_fsdp(group, steps):
    tokens = batches(4 * steps).unflatten(0, (steps, 4))
    alone, _ = train_alone(tokens, steps)
    model, _ = sharded_model(group, 2, 2)
    optimizer = torch.optim.AdamW(st.parameter_groups(model), lr=1e-3)
    train(model, optimizer, tokens[:, group.rank()], steps, lambda: st.reduce_gradients(model))
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        assert_close(whole(ours.detach()), theirs.detach(), name)


def test_ten_steps_with_fully_shard_are_those_of_one_process(workers):
    workers.run(4, compare_fsdp, 10)


def compare_accumulation(group, checkpointing):
    """Two micro-batches a step, and blocks that are computed again in backward."""
    tokens = batches(2 * group.size()).unflatten(0, (2, group.size()))
    alone = build_model("Qwen3Moe")
    for micro in tokens:
        (torch.stack([alone(b, labels=b).loss for b in micro]).mean() / 2).backward()
    model = build_model("Qwen3Moe")
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    for micro in tokens:
        own = micro[group.rank()]
        (model(own, labels=own).loss / 2).backward()
    st.reduce_gradients(model)
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
        if theirs.grad is not None:
            assert_close(whole(ours.grad), theirs.grad, name)


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
def test_accumulation_and_activation_checkpointing(workers, checkpointing):
    workers.run(2, compare_accumulation, checkpointing)


def save_checkpoint(group, folder, steps):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    tokens = batches(4 * steps).unflatten(0, (steps, 4))
    model = build_model("Qwen3Moe", num_experts=7)
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    optimizer = torch.optim.AdamW(st.parameter_groups(model), lr=1e-3)
    train(model, optimizer, tokens[:, group.rank()], steps, lambda: st.reduce_gradients(model))
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder, process_group=group)
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def load_checkpoint(group, folder, divided):
    """Into experts over these ranks with an optimizer, or into an unmodified model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = build_model("Qwen3Moe", seed=9, num_experts=7)
    moments = {}
    if divided:
        st.apply_expert_parallel(model, mesh_of(group), timeout=60)
        optimizer = torch.optim.AdamW(st.parameter_groups(model), lr=1e-3)
        parameters, state = get_state_dict(model, optimizer)
        dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder,
                 process_group=group)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)
        moments = {name: whole(optimizer.state[p]["exp_avg"])
                   for name, p in model.named_parameters()}
    else:
        parameters = model.state_dict()
        dcp.load({"model": parameters}, checkpoint_id=folder, process_group=group)
        model.load_state_dict(parameters)
    return {name: whole(p.detach()) for name, p in model.named_parameters()}, moments


def test_a_checkpoint_moves_between_numbers_of_ranks(workers, tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved = workers.run(4, save_checkpoint, folder, 2)[0]
    first = None
    for size, divided in ((4, True), (2, True), (1, True), (1, False)):
        parameters, moments = workers.run(size, load_checkpoint, folder, divided)[0]
        assert parameters.keys() == saved.keys()
        for name, values in saved.items():
            assert torch.equal(parameters[name], values), name
        first = first or moments
        assert all(torch.equal(values, first[name]) for name, values in moments.items())


def step_without_reducing(group):
    model = build_model("Mixtral")
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batches(1)[0]
    model(batch, labels=batch).loss.backward()
    with pytest.raises(InvalidArgument, match=r"call switchyard.torch.reduce_gradients\(model\)"):
        optimizer.step()
    st.reduce_gradients(model)
    optimizer.step()


def test_a_step_on_gradients_that_were_not_reduced_is_an_error(workers):
    workers.run(2, step_without_reducing)


def refuse(group):
    mesh = mesh_of(group)
    with pytest.raises(InvalidArgument, match="Linear has no experts that are known here"):
        st.apply_expert_parallel(torch.nn.Linear(2, 2), mesh)
    model = build_model("Mixtral")
    with pytest.raises(InvalidArgument, match="call apply_expert_parallel first"):
        st.reduce_gradients(model)
    st.apply_expert_parallel(model, mesh, timeout=60)
    with pytest.raises(InvalidArgument, match="is already a DTensor"):
        st.apply_expert_parallel(model, mesh)
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(InvalidArgument, match="2 dimensions .'dp', 'ep'.: pass the one"):
        st.apply_expert_parallel(build_model("Mixtral"), two)
    with pytest.raises(InvalidArgument, match="expected a process group .* not str"):
        st.ExpertParallel("ep", 4)


def test_what_cannot_be_divided_is_refused(workers):
    workers.run(4, refuse)  # all of the world, which makes the groups of a mesh together


def miss_gradients(group):
    """Parameters that some ranks have no gradient for, and calls that come twice."""
    model = build_model("Mixtral")
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    batch = batches(1)[0]
    model(batch, labels=batch).loss.backward()
    layers = model.model.layers
    mine = layers[group.rank()].self_attn.q_proj.weight
    other = layers[1 - group.rank()].self_attn.q_proj.weight
    expected = mine.grad / 2
    other.grad = None
    st.reduce_gradients(model)
    assert_close(mine.grad, expected, "a gradient that one rank has")
    assert other.grad is not None
    with pytest.raises(InvalidArgument, match="reduce_gradients was already called for these gradients"):
        st.reduce_gradients(model)
    model(batch, labels=batch).loss.backward()
    with pytest.raises(InvalidArgument, match="after the last backward"):
        st.reduce_gradients(model)
    model.zero_grad()
    model(batch, labels=batch).loss.backward()
    st.reduce_gradients(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if not hasattr(p, "to_local")],
                                lr=0.1)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    model(batch, labels=batch).loss.backward()
    with pytest.raises(InvalidArgument, match="were not reduced"):
        optimizer.step()  # though it has no experts
    st.reduce_gradients(model)


def test_gradients_that_ranks_lack_and_calls_that_come_twice(workers):
    workers.run(2, miss_gradients)


def forget_the_model(group):
    model = build_model("Mixtral")
    st.apply_expert_parallel(model, mesh_of(group), timeout=60)
    numbers = {block.switchyard_experts._number for block in model.modules()
               if hasattr(block, "switchyard_experts")}
    x = torch.randn(2, 3, 36, requires_grad=True)
    loss = model(inputs_embeds=x).logits.sum()
    del model
    if group.rank() == 1:
        gc.collect()
    loss.backward()
    assert x.grad.abs().sum() > 0
    return len(numbers)


def test_backward_needs_no_model_and_layers_share_their_dispatcher(workers):
    assert workers.run(2, forget_the_model) == [1, 1]
