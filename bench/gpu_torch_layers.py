# SPDX-License-Identifier: Apache-2.0
"""Torch's experts: TorchTitan's algorithm, the fastest that torch's operators allow, and one for
few tokens."""
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F


def swiglu(gate, up):
    return F.silu(gate) * up


def clamped_swiglu(gate, up):
    """As in gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Form(NamedTuple):
    code: int  # a Form of gpu_compare.cpp
    biases: bool
    activation: Callable


FORMS = {"swiglu": Form(0, False, swiglu), "gpt-oss": Form(1, True, clamped_swiglu)}


def sorted_rows(ids, num_experts):
    """Returns the assignments in the order of their experts, and where each expert's rows end."""
    order = torch.argsort(ids.view(-1), stable=True)
    counts = torch.histc(ids.view(-1).float(), bins=num_experts, min=0, max=num_experts)
    return order, torch.cumsum(counts, 0).to(torch.int32)


class TorchExperts(torch.nn.Module):
    """TorchTitan's algorithm with given picks."""

    def __init__(self, weights, top_k):
        super().__init__()
        i = weights.down.shape[-1]
        self.form, self.top_k = weights.form, top_k
        self.gate = torch.nn.Parameter(weights.gate_up[:, :i].contiguous())
        self.up = torch.nn.Parameter(weights.gate_up[:, i:].contiguous())
        self.down = torch.nn.Parameter(weights.down)
        if self.form.biases:
            self.gate_bias = torch.nn.Parameter(weights.gate_up_bias[:, :i].contiguous())
            self.up_bias = torch.nn.Parameter(weights.gate_up_bias[:, i:].contiguous())
            self.down_bias = torch.nn.Parameter(weights.down_bias)

    def forward(self, x, weights, ids):
        order, offsets = sorted_rows(ids, self.gate.shape[0])
        experts = ids.view(-1)[order]
        tokens = order // self.top_k

        def product(rows, name):
            matrices = getattr(self, name).transpose(-2, -1)
            out = torch._grouped_mm(rows, matrices, offs=offsets)
            if not self.form.biases:
                return out
            # In f32, because the gradient adds up the rows of an expert.
            return (out + getattr(self, name + "_bias").float()[experts]).to(out.dtype)

        rows = x[tokens]
        hidden = self.form.activation(product(rows, "gate"), product(rows, "up"))
        out = product(hidden, "down")
        out = (out.float() * weights.view(-1)[order][:, None]).to(x.dtype)
        index = tokens[:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_add_(0, index, out)


class Permuted(torch.autograd.Function):
    """Computes rows[order]. Its gradient is another permutation instead of a scatter-add."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, d_rows):
        inverse, = ctx.saved_tensors
        return d_rows[inverse], None, None


class RowsOfTokens(torch.autograd.Function):
    """Computes x[order // K]. Its gradient gathers each token's K rows and sums them."""

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, d_rows):
        inverse, = ctx.saved_tensors
        by_token = d_rows[inverse].view(-1, ctx.top_k, d_rows.shape[1])
        return by_token.float().sum(1).to(d_rows.dtype), None, None, None


class BiasOfRows(torch.autograd.Function):
    """Computes bias[experts] for sorted rows. Its gradient is a grouped product with ones instead
    of a scatter-add."""

    @staticmethod
    def forward(ctx, bias, experts, offsets):
        ctx.save_for_backward(offsets)
        return bias[experts]

    @staticmethod
    def backward(ctx, d_rows):
        offsets, = ctx.saved_tensors
        ones = d_rows.new_ones(d_rows.shape[0], 16).t()  # the narrowest that the operator takes
        return torch._grouped_mm(ones, d_rows, offs=offsets)[:, 0], None, None


class BestTorchExperts(torch.nn.Module):
    """The fastest that torch's own operators allow: gate and up in one product, and no
    scatter-add."""

    def __init__(self, weights, top_k):
        super().__init__()
        self.form, self.top_k = weights.form, top_k
        self.gate_up = torch.nn.Parameter(weights.gate_up)
        self.down = torch.nn.Parameter(weights.down)
        if self.form.biases:
            self.gate_up_bias = torch.nn.Parameter(weights.gate_up_bias)
            self.down_bias = torch.nn.Parameter(weights.down_bias)

    def forward(self, x, weights, ids):
        order, offsets = sorted_rows(ids, self.down.shape[0])
        experts = ids.view(-1)[order]
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)

        def product(rows, name):
            matrices = getattr(self, name).transpose(-2, -1)
            out = torch._grouped_mm(rows, matrices, offs=offsets)
            if not self.form.biases:
                return out
            return out + BiasOfRows.apply(getattr(self, name + "_bias"), experts, offsets)

        rows = RowsOfTokens.apply(x, order, inverse, self.top_k)
        gate, up = product(rows, "gate_up").chunk(2, dim=-1)
        out = product(self.form.activation(gate, up), "down")
        by_token = Permuted.apply(out, inverse, order).view(-1, self.top_k, x.shape[1])
        return (by_token.float() * weights[:, :, None]).sum(1).to(x.dtype)


class GatheredTorchExperts(torch.nn.Module):
    """For few tokens: copies the matrices of every pick, and multiplies in batches, as
    transformers' batched_mm does. Forward only."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x, weights, ids):
        w, picks = self.weights, ids.view(-1)
        rows = x.repeat_interleave(ids.shape[1], 0)

        def product(rows, matrices, bias):
            out = torch.bmm(matrices[picks], rows[:, :, None]).squeeze(-1)
            return out + bias[picks] if w.form.biases else out

        gate, up = product(rows, w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
        out = product(w.form.activation(gate, up), w.down, w.down_bias)
        return (out.view(*ids.shape, -1).float() * weights[:, :, None]).sum(1).to(x.dtype)


class TorchLayer:
    """Torch's experts with a batch, eager or compiled in a mode of torch.compile."""

    def __init__(self, experts, batch, mode=None):
        # A code object allows only a few compilations, then silently runs eagerly.
        if mode:
            torch.compiler.reset()
        self.experts = experts
        self.run = torch.compile(experts, dynamic=False, mode=mode) if mode else experts
        self.x = batch.x.clone().requires_grad_()
        self.weights = batch.weights.clone().requires_grad_()
        self.ids, self.d_y = batch.ids, batch.d_y

    def forward(self):
        with torch.no_grad():
            return self.run(self.x, self.weights, self.ids)

    def step(self):
        self.clear()
        self.run(self.x, self.weights, self.ids).backward(self.d_y)

    def leaves(self):
        return [self.x, self.weights, *self.experts.parameters()]

    def clear(self):
        for leaf in self.leaves():
            leaf.grad = None

    def peak_bytes(self):
        """Returns the peak memory of a step beyond its inputs and its results, y and the
        gradients."""
        self.step()
        self.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        returned = [self.x, *self.leaves()]  # y is as large as x
        return (torch.cuda.max_memory_allocated() - before
                - sum(t.numel() * t.element_size() for t in returned))


class TorchGraph:
    """The forward of torch's experts, compiled and captured in a CUDA graph, so that a replay costs
    the host as little as one of ours. Not for the default stream."""

    def __init__(self, run, batch):
        def forward():
            with torch.no_grad():
                return run(batch.x, batch.weights, batch.ids)

        for _ in range(3):
            forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = forward()

    def replay(self):
        self.graph.replay()
