# SPDX-License-Identifier: Apache-2.0
"""Trains a Mixture-of-Experts layer in plain PyTorch: a router, a plan, and experts over it.

    python examples/python/layer.py
"""
import torch

import switchyard.torch as st


class MoeLayer(torch.nn.Module):
    """Computes y[t] = Σ_k weight[t, k] · expert_k(x[t]) over the top_k experts of every token."""

    def __init__(self, hidden, intermediate, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.gate = torch.nn.Parameter(torch.randn(num_experts, hidden) * hidden**-0.5)
        self.gate_up = torch.nn.Parameter(
            torch.randn(num_experts, 2 * intermediate, hidden) * hidden**-0.5)
        self.down = torch.nn.Parameter(
            torch.randn(num_experts, hidden, intermediate) * intermediate**-0.5)

    def forward(self, x):
        ids, weights, _ = st.route(x, self.gate, self.top_k)
        plan = st.plan(ids, self.gate.shape[0])
        return st.moe(plan, x, weights, self.gate_up, self.down)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = MoeLayer(hidden=64, intermediate=128, num_experts=8, top_k=2).to(device)
    x = torch.randn(256, 64, device=device)
    target = torch.randn(256, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for step in range(41):
        loss = (compiled(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
