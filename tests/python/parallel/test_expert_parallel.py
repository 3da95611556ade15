"""Experts over 2 and 4 processes: the bits of one process with all tokens."""
import pytest
import torch

import switchyard
import switchyard.torch as st

H, I, K = 32, 24, 3
# Tokens of every rank, experts. 4 ranks own 2, 2, 2, 1 of 7 experts, and 2, 2, 1, 0 of 5.
FORMS = {"even": ((8, 8, 8, 8), 8), "uneven": ((7, 0, 13, 5), 7), "idle": ((3, 6, 1, 9), 5),
         "nobody": ((0, 0, 0, 0), 6), "one": ((0, 0, 0, 40), 6)}


class Problem:
    """The tokens of all ranks, and all experts."""

    def __init__(self, tokens, num_experts, dtype=torch.float32, biases=False):
        random = torch.Generator().manual_seed(3)
        total = sum(tokens)

        def tensor(*shape, scale=1.0):
            return (scale * torch.randn(*shape, generator=random)).to(dtype)

        self.first = [sum(tokens[:rank]) for rank in range(len(tokens) + 1)]
        self.ids = torch.rand(total, num_experts, generator=random).topk(K, 1).indices
        self.ids[torch.rand(total, K, generator=random) < 0.1] = -1
        self.x, self.d_y = tensor(total, H), tensor(total, H)
        self.weights = torch.rand(total, K, generator=random)
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


def equals_alone(group, form, dtype=torch.float32, biases=False, capacity=0, function="moe"):
    tokens, num_experts = FORMS[form]
    rank = group.rank()
    problem = Problem(tokens[:group.size()], num_experts, dtype, biases)
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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_one_process(workers, size, form):
    workers.run(size, equals_alone, form)


def test_bits_in_bf16_with_biases_and_bounded_rows(workers):
    workers.run(4, equals_alone, "uneven", torch.bfloat16)
    workers.run(4, equals_alone, "uneven", torch.float32, True)
    workers.run(4, equals_alone, "uneven", torch.float32, False, 80)
