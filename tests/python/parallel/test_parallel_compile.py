# SPDX-License-Identifier: Apache-2.0
"""torch.compile over experts that are divided over ranks."""
import pytest
import torch
from test_parallel_models import assert_close, batches, mesh_of, whole
from tiny_models import build_model

import switchyard.torch as st


def block_of(group, row_capacity):
    model = build_model("Qwen3Moe")
    st.apply_expert_parallel(model, mesh_of(group), timeout=60, row_capacity=row_capacity)
    return model.model.layers[0].mlp


def run(function, block, x):
    block.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = function(x)
    (y * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    return [y.detach(), x.grad, *(whole(p.grad) for p in block.parameters())]


def compare(group, backend, row_capacity):
    block = block_of(group, row_capacity)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    random = torch.Generator().manual_seed(group.rank())
    for _ in range(2):
        x = torch.randn(2, 6, 36, generator=random)
        for ours, eager in zip(run(compiled, block, x), run(block, block, x)):
            assert_close(ours, eager, "compiled", 1e-6)


@pytest.mark.parametrize("backend, row_capacity", [("aot_eager", 0), ("aot_eager", 100),
                                                   ("inductor", 0)])
def test_a_block_compiles_whole(workers, backend, row_capacity):
    workers.run(2, compare, backend, row_capacity)


def keep_exchanges(group):
    """Operators that ranks meet in stay, all of them and in their order, though nobody uses what
    some of them give."""
    experts = st.ExpertParallel(group, 4, row_capacity=32, timeout=60)
    seen = []

    def backend(graph, _inputs):
        seen.append([node.name for node in graph.graph.nodes if "shared_" in str(node.target)
                     or any("shared_" in str(a) for a in node.args)])
        return graph

    def function(x, ids):
        experts.dispatch(experts.plan(ids), x)  # for nothing
        plan = experts.plan(ids)
        return experts.combine(plan, experts.dispatch(plan, x), torch.ones(ids.shape))

    x, ids = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])
    compiled = torch.compile(function, fullgraph=True,
                             backend=lambda g, i: torch._dynamo.backends.common.aot_autograd(
                                 fw_compiler=backend)(g, i))
    with torch.no_grad():
        assert torch.equal(compiled(x, ids), function(x, ids))
    return len(seen[0])


def test_compile_drops_no_exchange(workers):
    assert workers.run(2, keep_exchanges) == [5, 5]
