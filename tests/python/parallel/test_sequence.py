# SPDX-License-Identifier: Apache-2.0
"""Sequences cut over four processes: the bits of one process, with both adjoints."""
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import switchyard.torch as st
from switchyard import InvalidArgument
from switchyard.torch._sequence import SequenceShard

H, I, K, E = 16, 8, 2, 6
PIECES = {13: (4, 4, 4, 1), 5: (2, 2, 1, 0), 8: (2, 2, 2, 2), 1: (1, 0, 0, 0), 0: (0, 0, 0, 0)}


@pytest.mark.parametrize("length", PIECES)
def test_pieces_are_consecutive_and_of_ceil_length(length):
    shards = [SequenceShard(3, length, 4, rank) for rank in range(4)]
    assert tuple(shard.count for shard in shards) == PIECES[length]
    assert [shard.num_tokens for shard in shards] == [3 * count for count in PIECES[length]]
    assert {shard.padded_length for shard in shards} == {-(-length // 4)}
    x = torch.arange(3 * length * 2).view(3, length, 2)
    assert torch.equal(torch.cat([shard.cut(x) for shard in shards], 1), x)
    assert torch.equal(shards[1].cut_tokens(x), shards[1].cut(x).reshape(-1, 2))


@pytest.mark.parametrize("arguments, values", [
    ((-1, 5, 2, 0), r"batch \(-1\) and length \(5\)"),
    ((1, -5, 2, 0), r"batch \(1\) and length \(-5\)"),
    ((1, 5, 0, 0), r"size \(0\)"),
    ((1, 5, 2, 2), r"size \(2\).* rank \(2\)"),
    ((1, 5, 2, -1), r"size \(2\).* rank \(-1\)"),
    ((2**32, 2**31, 2, 0), r"batch \(4294967296\) .*length \(2147483648\) .*more tokens"),
    ((0, 2**63 - 1, 2, 0), r"length \(9223372036854775807\)"),
])
def test_impossible_sizes_are_named(arguments, values):
    with pytest.raises(InvalidArgument, match=values):
        SequenceShard(*arguments)


def test_tensors_of_other_sizes_are_named():
    shard = SequenceShard(2, 5, 4, 2)
    with pytest.raises(InvalidArgument, match=r"x is \[2, 4, 3\], but must be \[2,5,…\]"):
        shard.cut(torch.zeros(2, 4, 3))
    with pytest.raises(InvalidArgument, match=r"local is \[2, 2, 3\], but must be \[2,1,…\]"):
        shard.gather(torch.zeros(2, 2, 3), None, backward="sum")
    with pytest.raises(InvalidArgument, match=r"tokens is \[3, 3\].* 2 x 1 tokens"):
        shard.gather_tokens(torch.zeros(3, 3), None, backward="sum")
    with pytest.raises(InvalidArgument, match="backward is 'mean'"):
        shard.gather(torch.zeros(2, 1, 3), None, backward="mean")
    with pytest.raises(TypeError, match="backward"):
        shard.gather(torch.zeros(2, 1, 3), None)


class Problem:
    """All tokens of `batch` sequences, their routing, all experts, and the gradients that four
    ranks have of the whole output."""

    def __init__(self, batch, length, dtype):
        random = torch.Generator().manual_seed(7)

        def tensor(*shape):
            return torch.randn(*shape, generator=random).to(dtype)

        self.shards = [SequenceShard(batch, length, 4, rank) for rank in range(4)]
        self.x, self.parts = tensor(batch, length, H), tensor(4, batch, length, H)
        self.gate = tensor(E, H)
        self.experts = [tensor(E, 2 * I, H), tensor(E, H, I)]

    def by_rank(self, full):
        """Tokens in the order in which ranks have them."""
        return torch.cat([shard.cut_tokens(full) for shard in self.shards])

    def alone(self, d_y):
        """y [tokens, H] of one process and all gradients, for d_y [batch, length, H]."""
        x, gate, *experts = (t.clone().requires_grad_()
                             for t in (self.by_rank(self.x), self.gate, *self.experts))
        ids, weights, _ = st.route(x, gate, K)
        y = st.moe(st.plan(ids, E), x, weights, *experts)
        y.backward(self.by_rank(d_y))
        return y.detach(), x.grad, [e.grad for e in experts]


def sum_in_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def layer_over_a_cut_sequence(group, batch, length, dtype, backward):
    problem = Problem(batch, length, dtype)
    rank = group.rank()
    shard = problem.shards[rank]
    ranks = st.ExpertParallel(group, E, timeout=60)
    own = ranks.placement.experts_of(rank)
    x, gate = shard.cut_tokens(problem.x).clone().requires_grad_(), problem.gate.clone()
    experts = [e[own].clone().requires_grad_() for e in problem.experts]
    ids, weights, _ = st.route(x, gate, K)
    tokens = ranks.moe(ranks.plan(ids), x, weights, *experts)
    full = shard.gather_tokens(tokens, group, backward=backward)
    # Replicated, every rank has the whole gradient; otherwise each has a part of its own.
    full.backward(problem.parts[0] if backward == "slice" else problem.parts[rank])
    y, d_x, d_experts = problem.alone(problem.parts[0] if backward == "slice"
                                      else sum_in_order(problem.parts))
    first = sum(s.num_tokens for s in problem.shards[:rank])
    assert full.shape == (batch, length, H) and full.is_contiguous()
    assert torch.equal(problem.by_rank(full), y)
    assert torch.equal(x.grad, d_x[first:first + shard.num_tokens])
    for ours, theirs in zip(experts, d_experts):
        assert torch.equal(ours.grad, theirs[own])
    ranks.close()


@pytest.mark.parametrize("backward", ["slice", "sum"])
@pytest.mark.parametrize("batch, length, dtype", [(1, 13, torch.float32), (1, 5, torch.float32),
                                                  (3, 13, torch.float32), (2, 5, torch.bfloat16)])
def test_a_layer_over_a_cut_sequence_has_the_bits_of_one_process(workers, batch, length, dtype,
                                                                 backward):
    workers.run(4, layer_over_a_cut_sequence, batch, length, dtype, backward)


def adjoints(group):
    """<gather(x), d> summed over ranks is <x, adjoint(d)> summed over ranks."""
    rank, random = group.rank(), torch.Generator().manual_seed(group.rank())
    for length in PIECES:
        shard = SequenceShard(2, length, 4, rank)
        x = torch.randn(2, shard.count, 3, generator=random, dtype=torch.float64).requires_grad_()
        d = torch.randn(2, length, 3, generator=random, dtype=torch.float64)
        full = shard.gather(x, group, backward="sum")
        full.backward(d)
        sides = torch.stack(((full * d).sum(), (x * x.grad).sum())).detach()
        dist.all_reduce(sides, group=group)
        torch.testing.assert_close(sides[0], sides[1])
        x.grad = None
        shard.gather(x, group, backward="slice").backward(d)
        assert torch.equal(x.grad, shard.cut(d))
    with pytest.raises(InvalidArgument, match=r"shard is rank 3 of 5, but this is rank \d of 4"):
        SequenceShard(1, 5, 5, 3).gather(torch.zeros(1, 1), group, backward="sum")
    ids = SequenceShard(2, 5, 4, rank).gather(
        SequenceShard(2, 5, 4, rank).cut(torch.arange(10).view(2, 5)), group, backward="slice")
    assert torch.equal(ids, torch.arange(10).view(2, 5))


def test_adjoints(workers):
    workers.run(4, adjoints)


def dtensors(group):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",))
    for length in PIECES:
        whole = torch.arange(2 * length * 3, dtype=torch.float32).view(2, length, 3)
        leaf = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        shard = SequenceShard.of(leaf)
        assert repr(shard) == repr(SequenceShard(2, length, 4, group.rank()))
        assert torch.equal(shard.cut(leaf), shard.cut(whole))
        full = shard.gather(leaf, backward="slice")
        assert torch.equal(full, whole) and not isinstance(full, DTensor)
        full.backward(2 * whole)
        assert torch.equal(leaf.grad.full_tensor(), 2 * whole)
        # Back again, with gradients both ways.
        local = shard.cut(whole).clone().requires_grad_()
        made = shard.to_dtensor(local, mesh)
        assert made.shape == whole.shape and made.placements == (Shard(1),)
        assert torch.equal(made.full_tensor(), whole)
        made.backward(distribute_tensor(3 * whole, mesh, [Shard(1)]))
        assert torch.equal(local.grad, 3 * shard.cut(whole))
        # A replicated tensor is cut, and its gradient is whole again.
        copies = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
        (shard.cut(copies) * (1 + group.rank())).sum().backward()
        scales = torch.cat([torch.full((SequenceShard(2, length, 4, r).count,), 1.0 + r)
                            for r in range(4)])
        assert torch.equal(copies.grad.full_tensor(), scales[None, :, None].expand(2, length, 3))
    with pytest.raises(InvalidArgument, match=r"placed \(Shard\(dim=2\),\)"):
        SequenceShard.of(distribute_tensor(whole, mesh, [Shard(2)]))
    with pytest.raises(InvalidArgument, match="partial"):
        SequenceShard.of(DTensor.from_local(whole, mesh, [Partial()]))
    with pytest.raises(InvalidArgument, match=r"length=0.*length=9"):
        SequenceShard(2, 9, 4, group.rank()).cut(leaf)


def test_dtensors_are_cut_alike(workers):
    workers.run(4, dtensors)


def meshes_of_two_dimensions(group):
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "sp"))
    whole = torch.arange(4 * 5 * 3, dtype=torch.float32).view(4, 5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    shard = SequenceShard.of(x)
    assert (shard.batch, shard.length, shard.size, shard.rank) == (2, 5, 2, group.rank() % 2)
    dp = group.rank() // 2
    assert torch.equal(shard.gather(x, backward="slice"), whole[2 * dp:2 * dp + 2])


def test_meshes_of_two_dimensions(workers):
    workers.run(4, meshes_of_two_dimensions)
