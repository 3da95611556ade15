# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own expert parallelism, DistributedConfig(ep_size=…), beside one process."""
import contextlib
import pathlib
import sys
import warnings

import pytest
import torch
import transformers

import switchyard.torch as st
from ranks import Workers
from switchyard import InvalidArgument, Unsupported
from switchyard.torch._hugging_face_parallel import install_ep

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hugging_face"))
from tiny_models import VOCABULARY, build_model  # noqa: E402

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(
    VERSION < (5, 20), reason=f"transformers {transformers.__version__} takes ep_size as tp_size "
    "alone, or not at all")
MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}


@pytest.fixture(scope="module")
def pair():
    """Two ranks that are the whole world, as transformers wants them."""
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model with so many experts."""

    def save(family, num_experts):
        folder = tmp_path_factory.getbasetemp() / f"{family}-{num_experts}"
        if not folder.exists():
            name = "num_local_experts" if family == "Mixtral" else "num_experts"
            build_model(family, **{name: num_experts}).save_pretrained(folder)
        return str(folder)

    return save


def load(folder, sizes=None, implementation="switchyard"):
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    config = DistributedConfig(**sizes) if sizes else None
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation,
                                                distributed_config=config)


@contextlib.contextmanager
def installed(**options):
    handle = install_ep(timeout=60, **options)
    try:
        yield handle
    finally:
        handle.remove()


def batches(steps, count):
    random = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCABULARY, (steps, count, 2, 6), generator=random)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_parameters(model):
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def assert_close(ours, theirs, name, tolerance=1e-5):
    error = torch.linalg.vector_norm((ours - theirs).double())
    norm = torch.linalg.vector_norm(theirs.double())
    assert error <= tolerance * norm + 1e-9, f"{name}: off by {error / norm:.2e}"


def compare_with_one_process(group, model, folder, sizes):
    """Ranks of a TP group have the same batch, the others batches of their own."""
    copies = sizes.get("tp_size", 1)
    tokens, = batches(1, group.size() // copies)
    alone = load(folder, implementation="eager")
    losses = [alone(batch, labels=batch).loss for batch in tokens]
    torch.stack(losses).mean().backward()
    own = group.rank() // copies
    out = model(tokens[own], labels=tokens[own])
    assert_close(out.logits, alone(tokens[own]).logits, "logits")
    assert_close(out.loss, losses[own], "loss")
    out.loss.backward()
    for (name, ours), (their_name, theirs) in zip(model.named_parameters(),
                                                  alone.named_parameters(), strict=True):
        assert (name, ours.shape) == (their_name, theirs.shape)
        if theirs.grad is not None:
            assert_close(whole(ours.grad), theirs.grad, name)


def compare_installed(group, folder, sizes, own_experts, capacity):
    with installed(row_capacity=capacity) as ep:
        model = load(folder, sizes)
        assert [experts.num_local_experts for experts in ep.experts] == 2 * [
            own_experts[group.rank() % len(own_experts)]]
        compare_with_one_process(group, model, folder, sizes)
        ep.check()


# Experts of every rank of the EP group; row capacity, 0 for exact buffers.
INSTALLED = {
    "even": ("Qwen3Moe", dict(fsdp_size=4, ep_size=4), (2, 2, 2, 2), 0),
    "uneven": ("Mixtral", dict(fsdp_size=4, ep_size=4), (2, 2, 2, 1), 0),
    "bounded": ("Mixtral", dict(fsdp_size=4, ep_size=4), (2, 2, 2, 1), 96),
    "idle": ("Qwen3Moe", dict(fsdp_size=4, ep_size=4), (2, 2, 1, 0), 0),
    "replicas": ("Mixtral", dict(fsdp_size=4, ep_size=2), (4, 3), 0),
    "slices": ("Qwen3Moe", dict(fsdp_size=2, tp_size=2, tp_plan={}, ep_size=4), (2, 2, 2, 1), 0),
}


@pytest.mark.parametrize("form", INSTALLED)
def test_four_ranks_are_as_one_process(workers, saved, form):
    family, sizes, own_experts, capacity = INSTALLED[form]
    workers.run(4, compare_installed, saved(family, sum(own_experts)), sizes, own_experts, capacity)


@pytest.mark.parametrize("sizes", [dict(fsdp_size=2, ep_size=2),
                                   dict(tp_size=2, tp_plan={}, ep_size=2)], ids=["fsdp", "tp"])
def test_two_ranks_are_as_one_process(pair, saved, sizes):
    pair.run(2, compare_installed, saved("Qwen3Moe", 7), sizes, (4, 3), 0)


@contextlib.contextmanager
def counted_calls():
    """How many picks the calls of our experts function have."""
    from transformers.integrations.moe import ExpertsInterface
    calls = []

    def forward(module, hidden_states, top_k_index, top_k_weights):
        calls.append(top_k_index.shape[1])
        return st.experts_forward(module, hidden_states, top_k_index, top_k_weights)

    ExpertsInterface.register("switchyard", forward)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", st.FallbackWarning)
            yield calls
    finally:
        ExpertsInterface.register("switchyard", st.experts_forward)


def compare_untouched(group, folder, sizes, top_k):
    with counted_calls() as calls:
        compare_with_one_process(group, load(folder, sizes), folder, sizes)
    assert calls == 2 * [top_k]


def test_their_dispatch_runs_our_experts(workers, pair, saved):
    workers.run(4, compare_untouched, saved("Qwen3Moe", 8), dict(fsdp_size=4, ep_size=2), 1)
    pair.run(2, compare_untouched, saved("Mixtral", 8), dict(tp_size=2, tp_plan={}, ep_size=2), 1)


def compare_with_grouped_mm(group, folder, sizes):
    batch = batches(1, group.size())[0, group.rank()]
    ours, theirs = load(folder, sizes), load(folder, sizes, "grouped_mm")
    for model in (ours, theirs):
        model(batch, labels=batch).loss.backward()
    for (name, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(whole(our.grad), whole(their.grad), name)


def test_gradients_are_right_with_each_expert_on_one_rank(pair, saved):
    """With each expert on one rank alone, torch 2.13 makes them too small without install_ep()."""
    pair.run(2, compare_with_grouped_mm, saved("Qwen3Moe", 8), dict(fsdp_size=2, ep_size=2))


def compare_masked(group, folder, sizes, top_k):
    compare_untouched(group, folder, sizes, top_k)
    with installed():
        compare_untouched(group, folder, sizes, top_k)


def test_masked_picks_are_ignored(pair, saved):
    sizes = dict(tp_size=2, tp_plan={}, ep_size=2, ep_plan=MASKED)
    pair.run(2, compare_masked, saved("Mixtral", 8), sizes, 2)


def wait_for_collectives(group):
    """Tensors of collectives that nobody has waited for have no pointer yet."""
    from torch.distributed._functional_collectives import (AsyncCollectiveTensor,
                                                           all_to_all_single_autograd)
    random = torch.Generator().manual_seed(group.rank())

    def pending(tensor):
        half = [tensor.shape[0] // group.size()] * group.size()
        received = all_to_all_single_autograd(tensor, half, half, group)
        assert type(received) is AsyncCollectiveTensor and received.data_ptr() == 0
        return received

    experts = st.ExpertParallel(group, 4, timeout=60)
    ids = torch.randint(0, 4, (8, 2), generator=random)
    x, d_y = torch.randn(2, 8, 32, generator=random)
    picks = torch.rand(8, 2, generator=random)
    gate_up = torch.randn(4, 48, 32, generator=random)
    down = torch.randn(4, 32, 24, generator=random)

    def run(plan, moe, num_experts, arrive):
        leaves = [tensor.clone().requires_grad_()
                  for tensor in (x, picks, gate_up[:num_experts], down[:num_experts])]
        y = moe(plan(arrive(ids)), *map(arrive, leaves[:2]), *leaves[2:])
        y.backward(arrive(d_y))
        return y, *(leaf.grad for leaf in leaves)

    for form in ((lambda ids: st.plan(ids, 4), st.moe, 4),
                 (experts.plan, experts.moe, experts.num_local_experts)):
        ours = run(*form, pending)
        theirs = run(*form, lambda tensor: pending(tensor).clone())
        assert all(map(torch.equal, ours, theirs))


def test_tensors_that_collectives_still_fill_are_waited_for(workers):
    workers.run(2, wait_for_collectives)


def train(model, optimizer, tokens):
    for batch in tokens:
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()


def save_state(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder)


def load_state(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    parameters, state = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)


def resume(group, folder, sizes, checkpoint):
    tokens = batches(4, group.size())[:, group.rank()]
    with installed():
        model = load(folder, sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, optimizer, tokens[:2])
        save_state(model, optimizer, checkpoint)
        train(model, optimizer, tokens[2:])
        resumed = load(folder, sizes)
        optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
        load_state(resumed, optimizer, checkpoint)
        train(resumed, optimizer, tokens[2:])
    for (name, ours), theirs in zip(whole_parameters(resumed).items(),
                                    whole_parameters(model).values()):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("sizes", [dict(fsdp_size=4, ep_size=4), dict(fsdp_size=4, ep_size=2)],
                         ids=["ep4", "ep2"])
def test_a_model_that_was_divided_at_load_resumes_to_the_bit(workers, saved, tmp_path, sizes):
    workers.run(4, resume, saved("Mixtral", 5), sizes, str(tmp_path / "checkpoint"))


def moments(model, optimizer):
    return {name: whole(optimizer.state[p]["exp_avg"]) for name, p in model.named_parameters()}


def save_all(group, folder, target):
    tokens = batches(1, group.size())[:, group.rank()]
    with installed():
        model = load(folder, dict(fsdp_size=4, ep_size=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, tokens)
    model.save_pretrained(f"{target}/files")
    model.save_pretrained(f"{target}/parts", distributed_checkpoint=True)
    save_state(model, optimizer, f"{target}/state")
    return whole_parameters(model), moments(model, optimizer)


def load_all(_group, folder, target, sizes):
    """Parameters from files, from parts and from a state; the moments of the last."""
    with installed() if sizes else contextlib.nullcontext():
        models = [load(source, sizes) for source in (f"{target}/files", f"{target}/parts", folder)]
    optimizer = torch.optim.AdamW(models[2].parameters(), lr=1e-3)
    load_state(models[2], optimizer, f"{target}/state")
    return [*map(whole_parameters, models), moments(models[2], optimizer)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_four_ranks_load_on_two_and_on_one(workers, pair, saved, tmp_path):
    folder, target = saved("Qwen3Moe", 7), str(tmp_path)
    parameters, expected_moments = workers.run(4, save_all, folder, target)[0]
    expected = [parameters, parameters, parameters, expected_moments]
    on_two = pair.run(2, load_all, folder, target, dict(fsdp_size=2, ep_size=2))[0]
    on_one = load_all(None, folder, target, None)
    for found in (on_two, on_one):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                assert torch.equal(ours[name], values), name


def overflow(group, folder):
    batch = batches(1, group.size())[0, group.rank()]
    with installed(row_capacity=8) as ep:
        model = load(folder, dict(fsdp_size=2, ep_size=2))
        ep.check()
        model(batch)
        with pytest.raises(InvalidArgument, match=r"needs room for \d+ rows and \d+ tokens, but "
                           "row_capacity is 8 and token_capacity 8") as error:
            ep.check()
        ep.check()  # which has forgotten it
        for experts in ep.experts:
            experts.set_capacity(96)
        model(batch)
        ep.check()
    return str(error.value)


def test_a_capacity_that_was_not_enough_is_told_on_all_ranks(pair, saved):
    first, second = pair.run(2, overflow, saved("Mixtral", 7))
    assert first == second


def styles():
    from transformers.core_model_loading import WeightConverter
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    return [*map(ALL_PARALLEL_STYLES.get, ("ep_dispatch_experts", "grouped_gemm")),
            WeightConverter.convert]


def test_remove_gives_their_styles_back():
    with installed():
        pass
    theirs = styles()
    first = install_ep()
    ours = styles()
    assert all(a is not b for a, b in zip(ours, theirs))
    second = install_ep(row_capacity=4)  # replaces the first
    first.remove()
    assert all(a is not b for a, b in zip(styles(), theirs))
    second.remove()
    second.remove()
    assert styles() == theirs


def test_what_cannot_be_installed_is_refused(monkeypatch):
    with pytest.raises(InvalidArgument, match=r"row_capacity \(-1\) must not be negative"):
        install_ep(row_capacity=-1)
    with pytest.raises(InvalidArgument, match=r"token_capacity \(-2\) must not be negative"):
        install_ep(token_capacity=-2)
    with installed():
        pass
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    monkeypatch.delitem(type(ALL_PARALLEL_STYLES)._global_mapping, "ep_dispatch_experts")
    with pytest.raises(Unsupported, match="does not dispatch tokens: it masks .*needs transformers"):
        install_ep()
