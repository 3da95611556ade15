# SPDX-License-Identifier: Apache-2.0
"""Experts over 2 and 4 processes: the bits of one process with all tokens."""
import pytest
import torch

import switchyard
import switchyard.torch as st
from switchyard.torch._expert_parallel import chunked

H, I, K = 32, 24, 3
# Tokens of every rank, experts. 4 ranks own 2, 2, 2, 1 of 7 experts, and 2, 2, 1, 0 of 5.
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FORMS = {"even": ((8, 8, 8, 8), 8), "uneven": ((7, 0, 13, 5), 7), "idle": ((3, 6, 1, 9), 5),
         "nobody": ((0, 0, 0, 0), 6), "one": ((0, 0, 0, 40), 6)}


class Problem:
    """The tokens of all ranks, and all experts."""

    def __init__(self, tokens, num_experts, device="cpu", dtype=torch.float32, biases=False):
        random = torch.Generator().manual_seed(3)
        total = sum(tokens)

        def tensor(*shape, scale=1.0):
            return (scale * torch.randn(*shape, generator=random)).to(device, dtype)

        self.first = [sum(tokens[:rank]) for rank in range(len(tokens) + 1)]
        self.ids = torch.rand(total, num_experts, generator=random).topk(K, 1).indices
        self.ids[torch.rand(total, K, generator=random) < 0.1] = -1
        self.ids = self.ids.to(device)
        self.x, self.d_y = tensor(total, H), tensor(total, H)
        self.weights = torch.rand(total, K, generator=random).to(device)
        self.experts = [tensor(num_experts, 2 * I, H, scale=H**-0.5),
                        tensor(num_experts, H, I, scale=I**-0.5)]
        if biases:
            self.experts += [tensor(num_experts, 2 * I), tensor(num_experts, H)]
        self.num_experts = num_experts

    def of(self, rank, own):
        """The part of one rank: ids, x, d_y, weights, and the experts that it owns."""
        part = slice(self.first[rank], self.first[rank + 1])
        return (self.ids[part], _leaf(self.x[part]), self.d_y[part], _leaf(self.weights[part]),
                [_leaf(experts[own]) for experts in self.experts])

    def alone(self):
        """y and gradients of one process, cut by nobody."""
        x, weights = _leaf(self.x), _leaf(self.weights)
        experts = [_leaf(e) for e in self.experts]
        y = st.moe(st.plan(self.ids, self.num_experts), x, weights, *experts)
        y.backward(self.d_y)
        return y.detach(), x.grad, weights.grad, [e.grad for e in experts]


def _leaf(tensor):
    return tensor.clone().requires_grad_()


def equals_alone(group, form, device, dtype=torch.float32, biases=False, capacity=0):
    tokens, num_experts = FORMS[form]
    rank = group.rank()
    problem = Problem(tokens[:group.size()], num_experts, device, dtype, biases)
    experts = st.ExpertParallel(group, num_experts, row_capacity=capacity, timeout=60)
    own = experts.placement.experts_of(rank)
    part = slice(problem.first[rank], problem.first[rank + 1])
    y, d_x, d_weights, d_experts = problem.alone()
    for _ in range(2):  # the second step finds memory of the first
        ids, x, d_y, weights, local = problem.of(rank, own)
        plan = experts.plan(ids)
        ours = experts.moe(plan, x, weights, *local)
        ours.backward(d_y)
        plan.check()
        assert torch.equal(ours, y[part])
        assert torch.equal(x.grad, d_x[part])
        assert torch.equal(weights.grad, d_weights[part])
        for ours, alone in zip(local, d_experts):
            assert torch.equal(ours.grad, alone[own])
    experts.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_one_process(workers, form, size, device):
    workers.run(size, equals_alone, form, device)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_in_bf16_with_biases_and_bounded_rows(workers, device):
    workers.run(4, equals_alone, "uneven", device, torch.bfloat16)
    workers.run(4, equals_alone, "uneven", device, torch.float32, True)
    workers.run(4, equals_alone, "uneven", device, torch.float32, False, 80)


def move_and_return(group, device, capacity):
    """Rows as every expert gets them, and what comes home of them."""
    tokens, num_experts = FORMS["uneven"]
    problem = Problem(tokens[:group.size()], num_experts, device)
    experts = st.ExpertParallel(group, num_experts, alignment=4, row_capacity=capacity, timeout=60)
    part = slice(problem.first[group.rank()], problem.first[group.rank() + 1])
    ids, x, d_y, weights, _ = problem.of(group.rank(), [])
    plan = experts.plan(ids)
    rows = experts.dispatch(plan, x)
    alone = st.plan(problem.ids, num_experts, alignment=4)
    all_rows = st.dispatch(alone, problem.x)
    offsets, counts = plan.row_offsets.tolist(), plan.group_rows.tolist()
    for i, expert in enumerate(experts.placement.experts_of(group.rank())):
        first = alone.row_offsets[expert]
        assert counts[i] == alone.group_rows[expert] and offsets[i] % 4 == 0
        assert torch.equal(rows[offsets[i]:offsets[i] + counts[i]],
                           all_rows[first:first + counts[i]])
        assert not rows[offsets[i] + counts[i]:offsets[i + 1]].any()
    y = experts.combine(plan, rows * 2, weights)
    y.backward(d_y)
    ones = (ids >= 0).float()
    total = (ones * weights).sum(1, keepdim=True)
    assert torch.allclose(y, 2 * total * x, atol=1e-5)
    assert torch.allclose(x.grad, 2 * total * d_y, atol=1e-5)
    assert torch.allclose(weights.grad, 2 * ones * (x * d_y).sum(1, keepdim=True), atol=1e-4)
    targets = torch.tensor([*experts.placement.owners, -1])[ids.cpu()]
    assert plan.target_ranks.tolist() == targets.tolist()
    assert ((plan.slots < 0) == (ids < 0)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [0, 120])
def test_rows_go_to_their_owners_and_come_home(workers, capacity, device):
    workers.run(4, move_and_return, device, capacity)


def refuse(group):
    experts = st.ExpertParallel(group, 4, timeout=60)
    assert experts.placement.owners == (0, 0, 1, 1)
    with pytest.raises(switchyard.InvalidArgument, match="owners names the ranks of 3 experts, but "
                       "there are 4"):
        st.ExpertParallel(group, 4, owners=[0, 1, 1])
    with pytest.raises(switchyard.InvalidArgument, match=r"row_capacity \(-1\)"):
        st.ExpertParallel(group, 4, row_capacity=-1)


def test_placements_and_capacities_are_checked(workers):
    workers.run(2, refuse)


def test_chunks_are_those_of_torch():
    for num_experts, num_ranks in ((20, 8), (7, 4), (5, 4), (3, 8), (8, 2)):
        ours = [len(chunked(num_experts, num_ranks).experts_of(rank)) for rank in range(num_ranks)]
        theirs = [len(chunk) for chunk in torch.arange(num_experts).chunk(num_ranks)]
        assert ours == theirs + [0] * (num_ranks - len(theirs))
    assert [len(chunked(20, 8).experts_of(rank)) for rank in range(8)] == [3, 3, 3, 3, 3, 3, 2, 0]


def graph_replays(group, device):
    """A captured step has the bits of one process for tokens that it was not captured with."""
    tokens, num_experts = FORMS["even"]
    problem = Problem(tokens[:group.size()], num_experts, device)
    experts = st.ExpertParallel(group, num_experts, row_capacity=64, timeout=60)
    rank, own = group.rank(), experts.placement.experts_of(group.rank())
    ids, x, d_y, weights, local = problem.of(rank, own)
    ids = ids.clone()

    def step():
        for leaf in (x, weights, *local):
            leaf.grad = None
        y = experts.moe(experts.plan(ids), x, weights, *local)
        y.backward(d_y)
        return y

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    before = experts.host_syncs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    assert experts.host_syncs() == before
    problem.x = problem.x.flip(0)
    problem.ids = problem.ids.flip(0)
    part = slice(problem.first[rank], problem.first[rank + 1])
    with torch.no_grad():
        x.copy_(problem.x[part])
        ids.copy_(problem.ids[part])
    graph.replay()
    alone, d_x, _, d_experts = problem.alone()
    assert torch.equal(y, alone[part]) and torch.equal(x.grad, d_x[part])
    assert all(torch.equal(o.grad, a[own]) for o, a in zip(local, d_experts))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_captured_step_replays_with_other_tokens(workers):
    workers.run(2, graph_replays, "cuda")
