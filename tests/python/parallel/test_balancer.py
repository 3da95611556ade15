# SPDX-License-Identifier: Apache-2.0
"""Biases that follow the loads of experts: what is counted, and how they move."""
import contextlib
import copy
import pathlib
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from switchyard import InvalidArgument, Unsupported
from switchyard.torch._balancer import LoadBalancer

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hugging_face"))
from tiny_models import build_model, token_ids  # noqa: E402


class Reference:
    """src/moe/layer/load_balancer.cpp, line by line, in f32."""

    def __init__(self, num_experts, rate, rule, decay):
        self.rate, self.rule, self.decay = np.float32(rate), rule, np.float32(decay)
        self.average = np.full(num_experts, np.float32(1) / np.float32(num_experts))

    def update(self, counts, bias):
        total, size = sum(counts), len(counts)
        if total == 0:
            return
        if self.rule == "sign":
            signs = [(n * size < total) - (n * size > total) for n in counts]
            mean = np.float32(sum(signs)) / np.float32(size)
            for e in range(size):
                bias[e] += self.rate * (np.float32(signs[e]) - mean)
            return
        for e in range(size):
            share = np.float32(counts[e]) / np.float32(total)
            self.average[e] += (np.float32(1) - self.decay) * (share - self.average[e])
            bias[e] += self.rate * (np.float32(1) / np.float32(size) - self.average[e])


def reach(balancer, key, picks):
    """A forward and backward with these picks."""
    y = torch.ones(len(picks), 1, requires_grad=True) * 1
    balancer.count(key, picks, y).sum().backward()


def picks_with(counts):
    ids = [e for e, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(ids, dtype=torch.int32).view(-1, 1)


@pytest.mark.parametrize("rule", ["sign", "moving_average"])
def test_biases_move_as_the_library_moves_them(rule):
    random = torch.Generator().manual_seed(1)
    sizes = {"a": 7, "b": 16, "c": 7}
    biases = {key: torch.randn(size, generator=random) for key, size in sizes.items()}
    expected = {key: bias.numpy().copy() for key, bias in biases.items()}
    balancer = LoadBalancer(biases, rate=0.013, rule=rule, decay=0.9)
    references = {key: Reference(size, 0.013, rule, 0.9) for key, size in sizes.items()}
    for step in range(4):
        for key, size in sizes.items():
            if (step, key) == (2, "c"):  # no picks: it stays
                continue
            counts = torch.randint(0, 9, (size,), generator=random).tolist()
            counts[step] = counts[step + 1]
            reach(balancer, key, picks_with(counts))
            references[key].update(counts, expected[key])
        balancer.step()
        for key, bias in biases.items():
            assert np.array_equal(bias.numpy(), expected[key]), (step, key)
    assert not any(counts.any() for counts in balancer.pick_counts().values())


def test_averages_are_saved_and_loaded():
    def steps(balancer, count):
        for i in range(count):
            reach(balancer, "layer", picks_with([5, 1, i]))
            balancer.step()

    through, resumed = torch.zeros(3), torch.zeros(3)
    whole = LoadBalancer({"layer": through}, rule="moving_average", decay=0.5)
    steps(whole, 2)
    saved = copy.deepcopy(whole.state_dict())
    resumed.copy_(through)
    steps(whole, 3)
    second = LoadBalancer({"layer": resumed}, rule="moving_average", decay=0.5)
    second.load_state_dict(saved)
    steps(second, 3)
    assert torch.equal(through, resumed)
    with pytest.raises(InvalidArgument, match=r"layers \['other'\], but .* here are \['0'\]"):
        second.load_state_dict({"other": saved["0"]})
    assert LoadBalancer({"layer": through}).state_dict() == {}


def test_missing_picks_are_not_counted():
    balancer = LoadBalancer({0: torch.zeros(3)})
    reach(balancer, 0, torch.tensor([[-1, 0], [3, 2], [99, 2]]))
    reach(balancer, 0, torch.zeros(0, 2, dtype=torch.int64))
    assert balancer.pick_counts()["0"].tolist() == [1, 0, 2]


@contextlib.contextmanager
def routed(model, path):
    """Collects the picks that a model's routers return, in training or not."""
    picks = []
    hooks = [module.register_forward_hook(lambda _m, _a, output: picks.append(output[2]))
             for name, module in model.named_modules() if name.endswith(path)]
    assert hooks
    yield picks
    for hook in hooks:
        hook.remove()


MODELS = {"DeepseekV3": "mlp.gate", "Ernie4_5_Moe": "mlp.gate", "NemotronH": "mixer.gate"}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_of_transformers_in_two_lines(family):
    model = build_model(family)
    balancer = LoadBalancer(model)
    before = copy.deepcopy(model.state_dict())
    with routed(model, MODELS[family]) as picks:
        model(token_ids(), labels=token_ids()).loss.backward()
    counts = balancer.pick_counts()
    assert len(counts) == len(picks) and all(name.endswith(".experts") for name in counts)
    balancer.step()
    after = model.state_dict()
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert len(moved) == len(picks)
    for name, own, ids in zip(moved, counts.values(), picks):
        assert name.endswith("e_score_correction_bias")
        assert torch.equal(own, torch.bincount(ids.flatten(), minlength=len(own)))
        bias = before[name].flatten().numpy().copy()
        Reference(len(own), 1e-3, "sign", 0).update(own.tolist(), bias)
        assert np.array_equal(after[name].flatten().numpy(), bias)


def test_each_training_forward_counts_once_and_nothing_else_does():
    model = build_model("DeepseekV3")
    balancer = LoadBalancer(model)
    ids = token_ids()

    def counted(run):
        run()
        counts, = balancer.pick_counts().values()
        balancer.step()
        return int(counts.sum())

    def forward():
        return model(ids, labels=ids).loss

    def evaluate():
        model.eval()
        forward()
        model.train()

    def twice_over_one_graph():
        loss = forward()
        loss.backward(retain_graph=True)
        loss.backward()

    def without_gradients():
        with torch.no_grad():
            forward()

    def checkpointed(reentrant):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.model.embed_tokens.weight.requires_grad_(True)
        forward().backward()
        model.gradient_checkpointing_disable()

    once = 3 * ids.numel()
    model.train()
    assert counted(lambda: forward().backward()) == once
    assert counted(lambda: [forward().backward() for _ in range(3)]) == 3 * once
    assert counted(forward) == 0
    assert counted(evaluate) == 0
    assert counted(without_gradients) == 0
    assert counted(twice_over_one_graph) == once
    assert counted(lambda: checkpointed(False)) == once
    assert counted(lambda: checkpointed(True)) == once
    balancer.close()
    assert counted(lambda: forward().backward()) == 0


class Titan(torch.nn.Module):
    """As TorchTitan has it: the router returns picks, and experts are told of counts."""

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(4, 6)

        def forward(self, x, bias):
            scores = self.gate(x).sigmoid()
            ids = (scores + bias).topk(2, 1).indices
            return scores.gather(1, ids), ids, torch.bincount(ids.flatten(), minlength=6)

    class Experts(torch.nn.Module):
        def forward(self, x, counts):
            return x * counts.sum()

    def __init__(self):
        super().__init__()
        self.router, self.experts = self.Router(), self.Experts()
        self.register_buffer("expert_bias", torch.zeros(6))

    def forward(self, x):
        scores, self.ids, counts = self.router(x, self.expert_bias)
        return self.experts(x, counts) * scores.sum(1, keepdim=True)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_routers_that_return_picks(reentrant):
    torch.manual_seed(0)
    block = Titan()
    balancer = LoadBalancer(torch.nn.ModuleDict({"moe": block}))
    explicit = LoadBalancer({block.router: block.expert_bias.clone()})
    x = torch.randn(9, 4, requires_grad=True)
    y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
    y.sum().backward()
    expected = torch.bincount(block.ids.flatten(), minlength=6)
    assert torch.equal(balancer.pick_counts()["moe.router"], expected)
    assert torch.equal(explicit.pick_counts()["0"], expected)


def test_biases_that_moved_are_found_again():
    block = Titan()
    balancer = LoadBalancer(block)
    old = block.expert_bias
    block._apply(torch.clone)  # as block.to() does
    assert block.expert_bias is not old
    block(torch.randn(9, 4)).sum().backward()
    balancer.step()
    assert block.expert_bias.any() and not old.any()


def test_copies_of_a_model_count_nothing():
    block = Titan()
    balancer = LoadBalancer(block)
    other = copy.deepcopy(block)
    other(torch.randn(9, 4)).sum().backward()
    assert balancer.pick_counts()["router"].sum() == 0
    block(torch.randn(9, 4)).sum().backward()
    assert balancer.pick_counts()["router"].sum() == 18


def test_models_compile_whole():
    model = build_model("DeepseekV3", experts_implementation="switchyard")
    block = model.model.layers[1].mlp
    balancer = LoadBalancer(block)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 36)
    for _ in range(2):
        with routed(block, "gate") as picks:
            block(x)
        compiled(x).sum().backward()
        counts, = balancer.pick_counts().values()
        assert torch.equal(counts, torch.bincount(picks[0].flatten(), minlength=8))
        balancer.step()


def test_errors_name_the_values():
    bias = torch.zeros(4)
    for options, text in (({"rate": -1.0}, r"rate \(-1.0\)"), ({"rate": float("nan")}, "nan"),
                          ({"rule": "mean"}, "rule is 'mean'"), ({"decay": 1.0}, r"decay \(1.0\)")):
        with pytest.raises(InvalidArgument, match=text):
            LoadBalancer({0: bias}, **options)
    with pytest.raises(InvalidArgument, match="no biases called e_score_correction_bias or"):
        LoadBalancer(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="bias of 0 is torch.bfloat16, .* steps of 0.001"):
        LoadBalancer({0: bias.bfloat16()})
    lonely = torch.nn.ModuleDict({"router": torch.nn.Linear(2, 2)})
    lonely["router"].register_buffer("expert_bias", bias)
    with pytest.raises(InvalidArgument, match="no module above 'router' has `experts`"):
        LoadBalancer(lonely)
    lonely["experts"] = torch.nn.Linear(2, 2)
    lonely["router"], lonely["other"] = torch.nn.Identity(), lonely["router"]
    del lonely["router"]
    with pytest.raises(InvalidArgument, match="take no top_k_index, and it has no router"):
        LoadBalancer(lonely)
    layer = torch.nn.Linear(2, 2)
    balancer = LoadBalancer({layer: bias})
    with pytest.raises(InvalidArgument, match="Linear neither takes nor returns picks"):
        layer(torch.ones(1, 2))
    balancer.close()
    model = build_model("DeepseekV3")
    LoadBalancer(model)
    experts = model.model.layers[1].mlp.experts
    experts._is_expert_parallel = True
    LoadBalancer(model)  # tokens are dispatched, and ids are of all experts
    model._ep_plan = {"layers.*.mlp.gate": "ep_router"}
    with pytest.raises(Unsupported, match="picks of model.layers.1.mlp.experts"):
        LoadBalancer(model)


def rank_of_several(group):
    """Ranks see other tokens, one of them none; biases end up as with all tokens at once."""
    alone, model = build_model("DeepseekV3"), build_model("DeepseekV3")
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    whole, balancer = LoadBalancer(alone, group=own), LoadBalancer(model, group=group)
    for step in range(2):
        batches = [token_ids(3, 7, seed=10 * step + rank) for rank in range(group.size() - 1)]
        for batch in batches:
            alone(batch, labels=batch).loss.backward()
        if group.rank() < len(batches):
            own = batches[group.rank()]
            model(own, labels=own).loss.backward()
        whole.step()
        balancer.step()
    for ours, theirs in zip(model.buffers(), alone.buffers()):
        assert torch.equal(ours, theirs)
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    return bias.tolist(), (bias - build_model("DeepseekV3").model.layers[1].mlp.gate
                           .e_score_correction_bias).abs().max().item()


def test_counts_of_all_ranks_are_added(workers):
    (bias, moved), *others = workers.run(4, rank_of_several)
    assert 0 < moved <= 0.0041  # two steps of rate · |sign − mean|
    assert all(other == (bias, moved) for other in others)


def sharded_bias(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(5.0) / 100
    bias, plain = distribute_tensor(whole, mesh, [Shard(0)]), whole.clone()
    balancer = LoadBalancer({0: bias, 1: plain}, group=group)
    for key in (0, 1):
        reach(balancer, key, picks_with([4, 0, 1, 2, group.rank()]))
    balancer.step()
    assert torch.equal(bias.full_tensor(), plain) and not torch.equal(plain, whole)


def test_a_bias_that_is_a_dtensor(workers):
    workers.run(2, sharded_bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_nothing_waits_for_a_gpu():
    block = Titan().cuda()
    block.router.forward = lambda x, bias: (
        (block.router.gate(x).sigmoid() + bias).topk(2, 1)[0],
        (block.router.gate(x).sigmoid() + bias).topk(2, 1)[1], torch.ones(6, device="cuda"))
    for rule in ("sign", "moving_average"):
        balancer = LoadBalancer(block, rule=rule)
        x = torch.randn(9, 4, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                block(x).sum().backward()
                balancer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert block.expert_bias.any()
        balancer.close()
