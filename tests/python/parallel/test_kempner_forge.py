# SPDX-License-Identifier: Apache-2.0
"""KempnerForge's MoE block over ranks: a block of its form beside one process, and the cases that
KempnerForge itself has recorded (tests/data/golden/README.md)."""
import copy
import json
import math
import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import switchyard.torch as st
from switchyard import Checkpoint, InvalidArgument, Unsupported
from switchyard.torch import _kempner_forge
from switchyard.torch._hugging_face import local

H, I, K = 24, 20, 3
GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "golden"
PLAIN = {"gelu": F.gelu, "relu": F.relu, "silu_alone": F.silu}


class Router(nn.Module):
    def __init__(self, hidden, num_experts, top_k, kind, seq_aux=0.0):
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.num_experts, self.top_k, self.kind, self.seq_aux = num_experts, top_k, kind, seq_aux
        if kind == "sigmoid_topk":
            self.expert_bias = nn.Parameter(torch.zeros(num_experts))
            self.register_buffer("expert_ema", torch.full((num_experts,), 1 / num_experts))

    def forward(self, x):
        logits = self.gate(x)
        is_sigmoid = self.kind == "sigmoid_topk"
        scores = torch.sigmoid(logits + self.expert_bias) if is_sigmoid else logits.softmax(-1)
        weights, ids = scores.topk(self.top_k, -1)
        self.choice = weights / weights.sum(-1, keepdim=True), ids
        self.expert_counts = torch.bincount(ids.flatten(), minlength=self.num_experts).float()
        share = self.expert_counts / ids.numel()
        aux = self.num_experts * (share * scores.mean(0)).sum()
        self.aux_loss = self.seq_aux * aux if is_sigmoid else aux
        self.z_loss = logits.logsumexp(-1).square().mean()
        if is_sigmoid and self.training:
            with torch.no_grad():
                used = self.expert_counts / (ids.numel() + 1e-8)
                self.expert_ema.copy_(0.99 * self.expert_ema + 0.01 * used)
                self.expert_bias += 1e-3 * (1 / self.num_experts - self.expert_ema)
        return self.choice


class Expert(nn.Module):
    def __init__(self, hidden, intermediate, activation):
        super().__init__()
        if activation == "silu":
            self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        else:
            self._activation = PLAIN[activation]
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        gated = hasattr(self, "gate_proj")
        inner = (F.silu(self.gate_proj(x)) * self.up_proj(x) if gated else
                 self._activation(self.up_proj(x)))
        return self.down_proj(inner)


class Block(nn.Module):
    """KempnerForge's block as far as Switchyard sees it, and a plain loop over its experts."""

    def __init__(self, num_experts, activation="silu", *, packed, hidden=H, intermediate=I, top_k=K,
                 router="softmax_topk", seq_aux=0.0, shared=True, capacity_factor=0.0,
                 gradient_scale=False):
        super().__init__()
        self.router = Router(hidden, num_experts, top_k, router, seq_aux)
        self.shared_expert = Expert(hidden, intermediate, "silu") if shared else None
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.gradient_scale = gradient_scale
        self.ep_world_size = 1
        self.factors = None  # [E] of gradient_scale
        experts = nn.ModuleList(Expert(hidden, intermediate, activation)
                                for _ in range(num_experts))
        if not packed:
            self.experts = experts
            return
        self._packed_activation = F.silu if activation == "silu" else PLAIN[activation]
        for name in ("up", "down", *(["gate"] if activation == "silu" else [])):
            weights = [getattr(expert, f"{name}_proj").weight.detach().T for expert in experts]
            setattr(self, f"{name}_w", nn.Parameter(torch.stack(weights)))

    def _run(self, x, expert):
        if hasattr(self, "experts"):
            return self.experts[expert](x)
        up = x @ self.up_w[expert]
        inner = (F.silu(x @ self.gate_w[expert]) * up if hasattr(self, "gate_w") else
                 self._packed_activation(up))
        return inner @ self.down_w[expert]

    def _local_forward(self, x, weights, ids):
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, k = (ids == expert).nonzero(as_tuple=True)
            rows = self._run(x[token], expert)
            if self.factors is not None:
                rows = rows * self.factors[expert]
            y = y.index_add(0, token, rows * weights[token, k].unsqueeze(1))
        return y

    def forward(self, x):
        tokens = x.view(-1, x.shape[-1])
        weights, ids = self.router(tokens)
        if self.capacity_factor > 0:
            most = max(1, math.ceil(ids.numel() / self.num_experts * self.capacity_factor))
            place = F.one_hot(ids, self.num_experts).cumsum(0).gather(2, ids.unsqueeze(2))
            weights = weights * (place.squeeze(2) <= most)
        y = self._local_forward(tokens, weights, ids)
        if self.shared_expert is not None:
            y = y + self.shared_expert(tokens)
        return y.view_as(x)


def expert_weights(block, expert):
    """The parameters of an expert, (out, in), by the names that the list form has."""
    if _kempner_forge.parameter_names(block):
        return {f"{name[:-2]}_proj.weight": getattr(block, name)[expert].T
                for name in _kempner_forge.parameter_names(block)}
    return dict(block.experts[expert].named_parameters())


def divide(block, group):
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    st.apply_expert_parallel(block, mesh, timeout=60)
    experts = block.switchyard_experts
    return experts, experts.placement.experts_of(experts.rank)


def own_gradients(block, own):
    """{expert: {name: gradient}} of this rank's experts, (out, in)."""
    names = _kempner_forge.parameter_names(block)
    if names:
        return {expert: {f"{name[:-2]}_proj.weight": local(getattr(block, name).grad)[i].T
                         for name in names} for i, expert in enumerate(own)}
    return {expert: {name: p.grad for name, p in block.experts[str(expert)].named_parameters()}
            for expert in own}


def error_of(ours, expected):
    return torch.linalg.vector_norm((ours - expected).double()).item()


def norm_of(tensor):
    return torch.linalg.vector_norm(tensor.double()).item()


def assert_near(ours, expected, name, tolerance=1e-6):
    error, norm = error_of(ours, expected), norm_of(expected)
    assert error <= tolerance * norm, f"{name}: off by {error:.1e} of {norm:.1e}"


def load_factors(ids, num_experts, num_ranks):
    """gradient_scale's factors, from the picks of all ranks."""
    counts = [int((ids == expert).sum()) for expert in range(num_experts)]
    each = -(-num_experts // num_ranks)
    factors = []
    for expert, count in enumerate(counts):
        owned = counts[expert // each * each:expert // each * each + each]
        factors.append(sum(owned) / len(owned) / max(count, 1))
    return torch.tensor(factors)


def equals_alone(group, packed, activation, num_experts, tokens, options, training=True):
    torch.manual_seed(7)
    block = Block(num_experts, activation, packed=packed, **options).train(training)
    inputs = [(torch.randn(1, count, H), torch.randn(1, count, H))
              for count in tokens[:group.size()]]
    alone = [copy.deepcopy(block) for _ in inputs]
    if block.gradient_scale and training:
        with torch.no_grad():
            ids = torch.cat([block.router(x[0])[1] for x, _ in inputs])
        for one in alone:
            one.factors = load_factors(ids, num_experts, group.size())
    expected = []
    for one, (x, d_y) in zip(alone, inputs):
        x = x.clone().requires_grad_()
        y = one(x)
        y.backward(d_y)
        expected.append((y, x.grad))

    rank = group.rank()
    experts, own = divide(block, group)
    for _ in range(2):
        block.zero_grad()
        x, d_y = inputs[rank]
        x = x.clone().requires_grad_()
        y = block(x)
        y.backward(d_y)
        assert_near(y, expected[rank][0], "y")
        assert_near(x.grad, expected[rank][1], "d_x")
        for name, parameter in alone[rank].named_parameters():
            if name.startswith(("router.", "shared_expert.")):
                ours = block.get_parameter(name).grad
                # Routing weights that add up to 1 make these differences of large numbers.
                floor = 1e-6 * norm_of(x.grad)
                assert error_of(ours, parameter.grad) <= 1e-6 * norm_of(ours) + floor, name
        for expert, gradients in own_gradients(block, own).items():
            for name, ours in gradients.items():
                total = sum(expert_gradient(one, expert, name) for one in alone)
                assert_near(ours, total, f"d_{name} of {expert}")
    experts.close()


def expert_gradient(block, expert, name):
    if hasattr(block, "experts"):
        return block.experts[expert].get_parameter(name).grad
    return getattr(block, name.replace("_proj.weight", "_w")).grad[expert].T


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", "silu_alone"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
def test_a_block_is_that_of_one_process(workers, packed, activation, size):
    workers.run(size, equals_alone, packed, activation, 8, (9, 5, 12, 7), {})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
@pytest.mark.parametrize("num_experts", [7, 5])
def test_experts_that_do_not_divide_and_a_rank_without_tokens(workers, packed, num_experts):
    """4 ranks own 2, 2, 2, 1 of 7 experts, and 2, 2, 1, 0 of 5."""
    workers.run(4, equals_alone, packed, "silu", num_experts, (6, 0, 11, 4), {})


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_capacity_and_gradient_scale(workers, packed, size):
    arguments = (packed, "silu", 7, (9, 5, 12, 7))
    workers.run(size, equals_alone, *arguments, {"capacity_factor": 0.8})
    workers.run(size, equals_alone, *arguments, {"gradient_scale": True, "capacity_factor": 0.8})
    workers.run(size, equals_alone, *arguments, {"gradient_scale": True}, False)


def autocasts(group):
    torch.manual_seed(8)
    block = Block(8, packed=True)
    alone = copy.deepcopy(block)
    experts, _ = divide(block, group)
    x = torch.randn(6 + group.rank(), H)
    with torch.no_grad():
        choice = block.router(x)
        expected = alone._local_forward(x, *choice)
        with torch.autocast("cpu", torch.bfloat16):
            ours = block._local_forward(x, *choice)
    assert ours.dtype == torch.float32
    assert 1e-4 * norm_of(expected) < error_of(ours, expected) < 2e-2 * norm_of(expected)
    experts.close()


def test_autocast_reaches_the_experts(workers):
    workers.run(2, autocasts)


def keeps_names(group):
    block = Block(5, packed=False)
    names = list(block.state_dict())
    whole = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    experts, own = divide(block, group)
    kept = [name for name in names if not name.startswith("experts.") or
            int(name.split(".")[1]) in own]
    assert list(block.state_dict()) == kept
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, whole[name])
    x = torch.randn(1, 4, H)
    twin = copy.deepcopy(block)
    assert torch.equal(twin(x), block(x))
    with torch.no_grad():
        for parameter in twin.experts.parameters():
            parameter.zero_()
    assert_near(twin(x), twin.shared_expert(x), "y of a copy without weights")
    assert not torch.equal(twin(x), block(x))
    assert all(map(_kempner_forge.matches, (block, twin)))
    experts.close()


def test_names_stay_and_a_block_can_be_copied(workers):
    workers.run(4, keeps_names)


class ExpertChoice(nn.Module):
    """KempnerForge's other block, whose experts choose tokens."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.router = Router(H, 4, 1, "softmax_topk")
        self.experts = nn.ModuleList(Expert(H, I, "silu") for _ in range(4))


def test_blocks_are_recognised():
    for packed in (True, False):
        block = Block(6, packed=packed)
        assert [name for name, module in block.named_modules()
                if _kempner_forge.matches(module)] == [""]
        assert _kempner_forge.num_experts(block) == 6
    assert _kempner_forge.parameter_names(Block(6, packed=True)) == ["gate_w", "up_w", "down_w"]
    assert _kempner_forge.parameter_names(Block(6, "relu", packed=True)) == ["up_w", "down_w"]
    assert _kempner_forge.parameter_names(Block(6, packed=False)) == []
    assert not _kempner_forge.matches(ExpertChoice())


def raises(group):
    def refuses(block, kind, text, num_experts=6):
        experts = st.ExpertParallel(group, num_experts, timeout=60)
        with pytest.raises(kind, match=text):
            _kempner_forge.install(block, experts)

    block = Block(6, packed=True)
    refuses(block, InvalidArgument, "num_experts is 6, but 8 experts", 8)
    block.ep_world_size = 2
    refuses(block, InvalidArgument, "ep_world_size is 2")
    block = Block(6, "gelu", packed=True)
    block._packed_activation = torch.tanh
    refuses(block, Unsupported, "_packed_activation is <.*tanh.*>, but must be gelu")
    block = Block(6, "relu", packed=False)
    block.experts[0]._activation = torch.tanh
    refuses(block, Unsupported, "_activation is <.*tanh.*>, but must be gelu")
    block = Block(6, packed=False)
    block.experts[3].up_proj = nn.Linear(H, I)
    refuses(block, Unsupported, r"experts.3 has the parameters .*'up_proj.bias'")
    block = Block(6, packed=False)
    weight = block.experts[2].up_proj.weight.detach()
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    block.experts[2].up_proj.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Shard(0)]))
    refuses(block, InvalidArgument, "experts.2.up_proj.weight is already a DTensor")


def test_blocks_that_cannot_be_divided_say_why(workers):
    workers.run(1, raises)


# Recorded cases.

def read_case(name):
    with Checkpoint(GOLDEN / f"{name}.safetensors") as recorded:
        return ({key: torch.from_numpy(recorded.read(key).copy()) for key in recorded},
                recorded.metadata)


def cases_of(peer, ranks):
    """Cases by their number of ranks; those of transformers have none."""
    found = []
    for file in sorted(GOLDEN.glob("*.safetensors")):
        with Checkpoint(file) as recorded:
            metadata = recorded.metadata
        if metadata["peer"].startswith(peer):
            if json.loads(metadata.get("case", '{"ep": 0}'))["ep"] in ranks:
                found.append(file.stem)
    return found


def recorded_block(case, tensors, packed):
    block = Block(case["experts"], case["activation"], packed=packed, hidden=case["dim"],
                  intermediate=case["hidden"], top_k=case["top_k"], router=case["router"],
                  seq_aux=case["seq_aux"], shared=bool(case["shared"]),
                  capacity_factor=case["capacity"], gradient_scale=case["gradient_scale"])
    weights = {key[len("weight."):]: tensor for key, tensor in tensors.items()
               if key.startswith("weight.")}
    if not packed:
        for name in [name for name in weights if name.endswith("_w")]:
            for expert, weight in enumerate(weights.pop(name)):
                weights[f"experts.{expert}.{name[:-2]}_proj.weight"] = weight.T
    missing, unknown = block.load_state_dict(weights, strict=False)
    assert not unknown and set(missing) <= {"router.expert_ema"}
    return block


def check_recorded(ours, recorded, name, d_x):
    """As the folder's README says."""
    assert ours.shape == recorded.shape, name
    if name == "expert_ids":
        assert torch.equal(ours, recorded)
        return
    allowed = (1e-4 if name == "expert_bias_after" else 1e-5) * norm_of(recorded)
    if name == "d.router.gate.weight" or norm_of(recorded) == 0.0:
        allowed = max(allowed, 1e-6 * norm_of(d_x))
    assert error_of(ours, recorded) <= allowed, name


def equals_recorded(group, name, packed):
    tensors, metadata = read_case(name)
    case = json.loads(metadata["case"])
    rank = group.rank()
    block = recorded_block(case, tensors, packed)
    experts, own = divide(block, group)
    x = tensors[f"rank{rank}.x"].unsqueeze(0).requires_grad_()
    y = block(x)
    y.backward(tensors[f"rank{rank}.dy"].unsqueeze(0))

    router = block.router
    ours = {"y": y[0], "dx": x.grad[0], "routing_weights": router.choice[0],
            "expert_ids": router.choice[1], "expert_counts": router.expert_counts,
            "d.router.gate.weight": router.gate.weight.grad}
    if x.shape[1] > 0:
        ours["aux_loss"], ours["z_loss"] = router.aux_loss.view(1), router.z_loss.view(1)
    if case["router"] == "sigmoid_topk":
        ours["expert_bias_after"] = router.expert_bias
        ours["expert_ema_after"] = router.expert_ema
    if block.shared_expert is not None:
        for key, parameter in block.shared_expert.named_parameters():
            ours[f"d.shared_expert.{key}"] = parameter.grad
    gradients = own_gradients(block, own)
    for key in gradients[own[0]]:
        stacked = torch.stack([gradients[expert][key].T for expert in own])
        ours[f"d.{key.replace('_proj.weight', '_w')}"] = stacked
    recorded = {key.split(".", 1)[1]: tensor for key, tensor in tensors.items()
                if key.startswith(f"rank{rank}.")}
    left = set(recorded) - set(ours) - {"x", "dy", "d.router.expert_bias"}
    assert left <= ({"aux_loss", "z_loss"} if x.shape[1] == 0 else set())
    for key, tensor in ours.items():
        check_recorded(tensor.detach(), recorded[key], key, recorded["dx"])
    experts.close()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "list"])
@pytest.mark.parametrize("name", cases_of("KempnerForge", (1, 2, 4)))
def test_recorded_cases(workers, name, packed):
    case = json.loads(read_case(name)[1]["case"])
    workers.run(case["ep"], equals_recorded, name, packed)


def test_which_cases_are_left_out():
    """The workers are four."""
    assert cases_of("KempnerForge", (8,)) == ["ep8_top4"]
    assert len(cases_of("KempnerForge", (1, 2, 4))) == 14


def recorded_router(config):
    """Keywords of st.route, without a bias."""
    keywords = {"top_k": config["num_experts_per_tok"],
                "normalise": config.get("norm_topk_prob", True)}
    if "n_routed_experts" in config:
        keywords.update(score="sigmoid", scale=config["routed_scaling_factor"],
                        num_expert_groups=config["n_group"],
                        kept_expert_groups=config["topk_group"])
    return keywords


def run_recorded_model(group, name):
    """Returns the results of one rank; with several ranks, the first has no tokens."""
    tensors, metadata = read_case(name)
    size, rank = group.size(), group.rank()
    total = len(tensors["x"])
    cuts = [0, *(total * r * r // (size - 1)**2 for r in range(size))] if size > 1 else [0, total]
    part = slice(*cuts[rank:rank + 2])
    weights = {key[len("weight."):]: tensor.requires_grad_() for key, tensor in tensors.items()
               if key.startswith("weight.")}
    experts = st.ExpertParallel(group, len(weights["gate.weight"]), timeout=60)
    own = experts.placement.experts_of(rank)
    x = tensors["x"][part].clone().requires_grad_()
    ids, picks, _ = st.route(x, weights["gate.weight"],
                             score_bias=tensors.get("buffer.gate.e_score_correction_bias"),
                             **recorded_router(json.loads(metadata["config"])))
    local = [weights[f"experts.{key}"][own] for key in ("gate_up_proj", "down_proj")]
    y = experts.moe(experts.plan(ids), x, picks, *local)
    if "shared_experts.up_proj.weight" in weights:
        gate, up, down = (weights[f"shared_experts.{key}_proj.weight"]
                          for key in ("gate", "up", "down"))
        y = y + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    y.backward(tensors["dy"][part])
    gradients = {}
    for key, weight in weights.items():
        dist.all_reduce(weight.grad, group=group)  # of experts, zeros but on their rank
        gradients[f"d.{key}"] = weight.grad
    experts.close()
    return y.detach(), x.grad, gradients


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", cases_of("transformers", (0,)))
def test_recorded_cases_of_transformers(workers, name, size):
    tensors, _ = read_case(name)
    parts = workers.run(size, run_recorded_model, name)
    ours = {"y": torch.cat([y for y, _, _ in parts]), "dx": torch.cat([d for _, d, _ in parts]),
            **parts[0][2]}
    assert {key for key in tensors if key.startswith("d.")} <= set(ours)
    for key, tensor in ours.items():
        check_recorded(tensor, tensors[key], key.replace("d.gate.", "d.router.gate."),
                       tensors["dx"])


def reduce_and_clip(group, packed):
    """Gradients of the mean of all ranks' losses, and their norm, as one process has them."""
    torch.manual_seed(7)
    block = Block(6, packed=packed)
    alone = copy.deepcopy(block)
    inputs = [torch.randn(1, 5 + rank, H) for rank in range(group.size())]
    torch.stack([alone(x).square().mean() for x in inputs]).mean().backward()
    divide(block, group)
    block(inputs[group.rank()]).square().mean().backward()
    st.reduce_gradients(block)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        assert_near(whole, expected[name], name, 1e-5)
    norm = st.clip_grad_norm_(block, 0.1)
    assert_near(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1), "norm", 1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_are_reduced_and_clipped(workers, packed):
    workers.run(4, reduce_and_clip, packed)
