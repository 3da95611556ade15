# SPDX-License-Identifier: Apache-2.0
"""Steps over experts of bounded sizing: run again, they are the exact step to the bit."""
import functools
import os
import pathlib
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import switchyard.torch as st
from switchyard import CommunicationError, InvalidArgument
from switchyard.torch import _steps
from switchyard.torch._balancer import LoadBalancer
from switchyard.torch._steps import run_step

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hugging_face"))
from tiny_models import build_model, token_ids  # noqa: E402

H, I, K, E, LAYERS = 16, 8, 2, 6, 2
PLENTY = 4096


class Layer(torch.nn.Module):
    """An MoE layer with dropout, and a buffer that counts its tokens."""

    def __init__(self, experts, sample):
        super().__init__()
        own = experts.placement.experts_of(experts.rank)
        self.switchyard_experts = experts
        self.gate = torch.nn.Parameter(sample(E, H))
        self.gate_up = torch.nn.Parameter(sample(E, 2 * I, H)[own])
        self.down = torch.nn.Parameter(sample(E, H, I)[own])
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("num_tokens", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_tokens += len(x)
        ids, weights, _ = st.route(x, self.gate, K, score_bias=self.bias)
        plan = self.switchyard_experts.plan(ids)
        dropped = torch.nn.functional.dropout(x, 0.25, self.training)
        y = self.switchyard_experts.moe(plan, dropped, weights, self.gate_up, self.down)
        return self.count(ids, y)


class Model(torch.nn.Module):
    def __init__(self, group, capacities=(0,) * LAYERS, **options):
        super().__init__()
        random = torch.Generator().manual_seed(1)

        def sample(*shape):
            return torch.randn(*shape, generator=random)

        self.layers = torch.nn.ModuleList(
            Layer(st.ExpertParallel(group, E, row_capacity=capacity, timeout=60, **options), sample)
            for capacity in capacities)
        self.balancer = LoadBalancer({i: layer.bias for i, layer in enumerate(self.layers)},
                                     group=group)
        for i, layer in enumerate(self.layers):
            layer.count = functools.partial(self.balancer.count, i)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

    @property
    def experts(self):
        return [layer.switchyard_experts for layer in self.layers]

    def close(self):
        for experts in self.experts:
            experts.close()


def tokens_of(rank, num_tokens):
    return torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(100 + rank))


def step_of(model, x):
    def step():
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return step


def state_of(model):
    return [*(p.grad for p in model.parameters()), *model.buffers(),
            *model.balancer.pick_counts().values(), torch.get_rng_state()]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a is None and b is None or torch.equal(a, b)


def is_the_exact_step(group, capacities, options, keep_gradients):
    x = tokens_of(group.rank(), 0 if group.rank() == 1 else 24)
    exact = Model(group, alignment=options["alignment"])
    bounded = Model(group, capacities, **options)
    for model in (exact, bounded):
        for i, p in enumerate(model.parameters()):  # what was accumulated before; None elsewhere
            p.grad = torch.full_like(p, 0.5) if keep_gradients and i % 2 else None
    for ran_again in (True, False):  # the second time there is room
        torch.manual_seed(group.rank())
        value = step_of(exact, x)()
        expected = state_of(exact)
        torch.manual_seed(group.rank())
        result = run_step(bounded, step_of(bounded, x), group=group)
        assert result.ran_again == ran_again
        assert torch.equal(result.value, value)
        assert_same(state_of(bounded), expected)
    for model in (exact, bounded):
        model.balancer.step()
    assert all(torch.equal(a.bias, b.bias) and a.bias.any()
               for a, b in zip(exact.layers, bounded.layers))
    for experts, capacity in zip(bounded.experts, capacities):
        if capacity == PLENTY and "token_capacity" not in options:
            assert experts.row_capacity == PLENTY
        else:
            assert experts.row_capacity > capacity or experts.token_capacity > 2
        assert experts.row_capacity % options["alignment"] == 0
    exact.close()
    bounded.close()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capacities, options", [
    ((4, PLENTY), {"alignment": 4}), ((PLENTY, 4), {"alignment": 4}), ((4, 4), {"alignment": 1}),
    ((PLENTY, PLENTY), {"alignment": 1, "token_capacity": 2})])
def test_a_step_that_runs_again_is_the_exact_step(workers, size, capacities, options):
    workers.run(size, is_the_exact_step, capacities, options, size == 2)


def grow_to_what_was_needed(group):
    ids = torch.zeros(9, 1, dtype=torch.int64) if group.rank() == 0 else torch.full((3, 1), 5)
    experts = st.ExpertParallel(group, E, alignment=8, row_capacity=8, token_capacity=5, timeout=60)

    def step():
        return experts.plan(ids)

    assert run_step([experts], step, group=group, parameters=()).ran_again
    # Expert 0 has 9 rows, padded to 16; with an eighth more 18, rounded up to 24.
    assert (experts.row_capacity, experts.token_capacity) == (24, 10)
    assert not run_step([experts], step, group=group, parameters=()).ran_again
    assert (experts.row_capacity, experts.token_capacity) == (24, 10)
    experts.close()


def test_capacities_grow_to_what_was_needed(workers):
    workers.run(2, grow_to_what_was_needed)


def one_group_of_two_overflows(group):
    """Ranks 2 and 3 have many tokens, ranks 0 and 1 few: all run again, and all grow."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "ep"))
    x = tokens_of(group.rank(), 40 if group.rank() >= 2 else 2)
    exact, bounded = Model(mesh["ep"].get_group()), Model(mesh["ep"].get_group(), (32, PLENTY))
    torch.manual_seed(group.rank())
    step_of(exact, x)()
    torch.manual_seed(group.rank())
    assert run_step(bounded, step_of(bounded, x)).ran_again
    assert_same(state_of(bounded)[:-1], state_of(exact)[:-1])
    capacities = [None] * 4
    dist.all_gather_object(capacities, [e.row_capacity for e in bounded.experts])
    assert capacities == [capacities[0]] * 4 and capacities[0][0] > 32
    assert capacities[0][1] == PLENTY
    assert not run_step(bounded, step_of(bounded, x)).ran_again
    bounded.close()
    exact.close()


def test_ranks_of_other_groups_of_experts_run_again_too(workers):
    workers.run(4, one_group_of_two_overflows)


def several_microbatches(group):
    """Gradients are accumulated over three forwards of one step, one of them with many tokens."""
    exact, bounded = Model(group), Model(group, (16, 16))

    def step(model):
        for i, count in enumerate((5, 40, 5)):
            model(tokens_of(10 * i + group.rank(), count)).sum().backward()

    torch.manual_seed(3)
    step(exact)
    torch.manual_seed(3)
    assert run_step(bounded, lambda: step(bounded), group=group).ran_again
    assert_same(state_of(bounded)[:-1], state_of(exact)[:-1])
    exact.close()
    bounded.close()


def test_a_step_may_run_a_layer_several_times(workers):
    workers.run(2, several_microbatches)


def recomputed(group, reentrant):
    exact, bounded = Model(group), Model(group, (4, 4))
    x = tokens_of(group.rank(), 20)

    def step(model):
        leaf = x.clone().requires_grad_()
        y = leaf
        for layer in model.layers:
            y = y + torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=reentrant)
        y.square().sum().backward()
        return leaf.grad

    torch.manual_seed(3)
    expected = step(exact)
    torch.manual_seed(3)
    result = run_step(bounded, lambda: step(bounded), group=group)
    assert result.ran_again and torch.equal(result.value, expected)
    assert_same(state_of(bounded), state_of(exact))
    exact.close()
    bounded.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_step_may_recompute_activations(workers, reentrant):
    workers.run(2, recomputed, reentrant)


def a_model_of_transformers(group):
    """Its experts are DTensors, and so are their gradients."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    ids = token_ids(2, 9, seed=group.rank())
    results = []
    for row_capacity in (0, 4):
        model = build_model("DeepseekV3")
        st.apply_expert_parallel(model, mesh, row_capacity=row_capacity, timeout=60)
        balancer = LoadBalancer(model, group=group)
        grown = []
        for _ in range(2):
            result = run_step(model, lambda: model(ids, labels=ids).loss.backward(), group=group)
            grown.append(result.ran_again)
        assert grown == [row_capacity > 0, False]
        balancer.step()
        results.append([getattr(t, "_local_tensor", t) for t in
                        (*(p.grad for p in model.parameters()), *model.buffers())])
    assert_same(*results)


def test_a_model_of_transformers(workers):
    workers.run(2, a_model_of_transformers)


def reads(group):
    """The sizes of tensors that are read in a step of six plans, but for what ranks vote on."""
    model = Model(group, (PLENTY, PLENTY))
    step = step_of(model, tokens_of(group.rank(), 8))
    sizes = []
    tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda self: sizes.append(len(self)) or tolist(self)
    try:
        run_step(model, lambda: [step() for _ in range(3)], group=group)
    finally:
        torch.Tensor.tolist = tolist
    model.close()
    return [size for size in sizes if size != 1 + _steps._NUM_VOTES]


def test_all_plans_are_read_at_once(workers):
    assert workers.run(2, reads) == [[LAYERS * (3 + 2 * 2)]] * 2


def bad_ids(group, capacity):
    model = Model(group, (capacity, capacity))
    gradient = torch.ones_like(model.layers[0].gate)
    model.layers[0].gate.grad = gradient.clone()
    x = tokens_of(group.rank(), 10)
    ids = torch.arange(10)[:, None] % E

    def step(bad):
        step_of(model, x)()
        model.experts[1].plan(torch.where(ids == 3, bad, ids) if group.rank() == 1 else ids)

    for bad in (E + 3, -7):
        with pytest.raises(InvalidArgument, match=rf"rank 1 of 2 made .* expert id {bad}, but "
                           "there are 6 experts"):
            run_step(model, lambda: step(bad), group=group)
        assert torch.equal(model.layers[0].gate.grad, gradient)
        assert model.layers[0].down.grad is None
        assert not any(counts.any() for counts in model.balancer.pick_counts().values())
        assert not model.layers[0].num_tokens
    assert not run_step(model, lambda: step(0), group=group).ran_again  # the next one works
    model.close()


def test_bad_ids_are_an_error_on_every_rank(workers):
    workers.run(2, bad_ids, PLENTY)


def bad_ids_and_overflow(group):
    model = Model(group, (4, 4))
    ids = torch.full((10, 1), E + 3 if group.rank() == 1 else 0)

    def step():
        step_of(model, tokens_of(group.rank(), 10))()
        model.experts[1].plan(ids)

    # The second run may hear from the other rank first.
    with pytest.raises((InvalidArgument, CommunicationError),
                       match=rf"rank 1: expert_ids\[0,0\] is {E + 3}"):
        run_step(model, step, group=group)
    assert all(p.grad is None for p in model.parameters())
    assert [e.row_capacity for e in model.experts] == [4, 4]


def test_bad_ids_are_an_error_of_the_exact_run(workers):
    workers.run(2, bad_ids_and_overflow)


def one_rank_raises(group, when):
    """Ranks 0 and 1 share experts, and so do ranks 2 and 3; rank 1 raises."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "ep"))
    world = dist.new_group(range(4))  # which is of no use afterwards
    model = Model(mesh["ep"].get_group(), (4, PLENTY) if when == "again" else (PLENTY, PLENTY))
    x = tokens_of(group.rank(), 12)
    for experts in model.experts:  # sets up what ranks share
        experts.plan(torch.zeros(1, 1, dtype=torch.int64))
    runs = []

    def step():
        runs.append(None)
        fails = group.rank() == 1 and len(runs) == (2 if when == "again" else 1)
        if fails and when == "first":
            raise ValueError("no more data")
        y = model(x)
        if fails and when != "last":
            raise ValueError("no more data")
        y.sum().backward()
        if fails:
            raise ValueError("no more data")

    began = time.monotonic()
    with pytest.raises(ValueError if group.rank() == 1 else CommunicationError) as caught:
        run_step(model, step, group=world)
    assert "no more data" in str(caught.value), caught.value
    assert time.monotonic() - began < 20
    assert all(p.grad is None for p in model.parameters())
    assert model.experts[0].row_capacity == (4 if when == "again" else PLENTY)


@pytest.mark.parametrize("when", ["first", "between", "last", "again"])
def test_nobody_waits_for_a_rank_that_raises(workers, when):
    workers.run(4, one_rank_raises, when)


def others_go_on(group):
    """Steps that fail leave nothing behind that the next one would stumble over."""
    def fails():
        raise ValueError(f"attempt {attempt}")

    for attempt in range(3):
        is_bad = group.rank() == attempt
        error = ValueError if is_bad else CommunicationError
        with pytest.raises(error, match=f"attempt {attempt}"):
            run_step([], fails if is_bad else lambda: None, group=group, parameters=())
        assert run_step([], lambda: attempt, group=group, parameters=()) == (attempt, False)


def test_after_a_step_that_failed_the_next_one_works(workers):
    workers.run(4, others_go_on)


def ends_in_a_step(group):
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 2 has ended"):
        run_step([], lambda: os._exit(1) if group.rank() == 2 else None, group=group, parameters=())
    return time.monotonic() - began


def test_a_rank_that_ends_is_named(three):
    three.run(3, others_go_on)
    three.start(3, ends_in_a_step)
    assert all(ok and seconds < 10 for ok, seconds in three.answers((0, 1), 30))


def compiled(group):
    exact, bounded = Model(group), Model(group, (4, 4))
    x = tokens_of(group.rank(), 20)

    def step(model, forward):
        y = forward(x)
        y.square().sum().backward()
        return y.detach()

    for model in (exact, bounded):
        model.eval()  # compiled dropout has random numbers of its own
    expected = step(exact, exact)
    forward = torch.compile(bounded, fullgraph=True, backend="aot_eager")
    for ran_again in (True, False):
        bounded.zero_grad()
        result = run_step(bounded, lambda: step(bounded, forward), group=group)
        assert result.ran_again == ran_again
        assert torch.equal(result.value, expected)
        for ours, theirs in zip(bounded.parameters(), exact.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
    exact.close()
    bounded.close()


def test_a_compiled_step_runs_again(workers):
    workers.run(2, compiled)


def test_arguments_are_checked():
    with pytest.raises(InvalidArgument, match="parameters is None"):
        run_step([], lambda: None)
    with pytest.raises(InvalidArgument, match="not dict"):
        run_step([{}], lambda: None, parameters=())


def test_a_process_alone():
    weight = torch.ones(3, requires_grad=True)
    result = run_step([], lambda: weight.sum().backward(), parameters=[weight])
    assert result == (None, False) and torch.equal(weight.grad, torch.ones(3))

    def fails():
        weight.sum().backward()
        raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):
        run_step([], fails, parameters=[weight])
    assert torch.equal(weight.grad, torch.ones(3))
