# SPDX-License-Identifier: Apache-2.0
"""TorchTitan's token dispatcher over Switchyard, against a stub of TorchTitan's interface, and
against the package itself where it is installed."""
import contextlib
import dataclasses
import importlib
import sys
import types
import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

D, F, K = 32, 16, 3
TOLERANCE = 1e-6
# Tokens of every rank, experts. Of 5 experts 4 ranks own 2, 2, 1, 0, and 2 ranks 3, 2.
FORMS = {"even": ((8, 8, 8, 8), 8), "uneven": ((7, 0, 13, 5), 8), "idle": ((0, 6, 1, 9), 5),
         "nobody": ((0, 0, 0, 0), 4)}
TARGET = "switchyard.torchtitan.token_dispatcher"


class Registry:
    """torchtitan.config.override, and what applies overrides to a config."""

    def __init__(self):
        self.factories = {}

    def override(self, *, target, description=""):
        def register(factory):
            name = f"{factory.__module__}.{factory.__name__}"
            assert name not in self.factories and description
            self.factories[name] = (target, factory)
            return factory

        return register

    def apply(self, name, config, **options):
        target, factory = self.factories[name]
        assert isinstance(config, target)
        return factory(config, **options)


def stub_classes():
    """The contract of the dispatchers in torchtitan.models.common.token_dispatcher."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class BaseConfig:
        num_experts: int
        top_k: int

    class BaseEPTokenDispatcher:
        Config = BaseConfig

        def __init__(self, config):
            self.num_experts, self.top_k = config.num_experts, config.top_k
            self.ep_mesh = None

        def wire_meshes(self, *, ep_mesh):
            self.ep_mesh = ep_mesh
            self.init_buffer()

    @dataclasses.dataclass(kw_only=True, slots=True)
    class AllToAllConfig(BaseConfig):
        score_before_experts: bool = False

    class AllToAllTokenDispatcher(BaseEPTokenDispatcher):
        Config = AllToAllConfig

    @dataclasses.dataclass(kw_only=True, slots=True)
    class PaddedConfig(AllToAllConfig):
        pad_multiple: int
        surprise: str = "none"

    return BaseEPTokenDispatcher, AllToAllTokenDispatcher, PaddedConfig


@contextlib.contextmanager
def without_modules(*prefixes):
    """These modules are imported anew inside, and are as before after it."""
    def mine():
        return [name for name in sys.modules
                if any(name == p or name.startswith(f"{p}.") for p in prefixes)]

    kept = {name: sys.modules.pop(name) for name in mine()}
    try:
        yield
    finally:
        for name in mine():
            del sys.modules[name]
        sys.modules.update(kept)


@contextlib.contextmanager
def stubbed():
    """(switchyard.torchtitan, the registry, AllToAllTokenDispatcher, a Config that pads)."""
    registry = Registry()
    base, all_to_all, padded = stub_classes()
    contents = {"torchtitan": {}, "torchtitan.config": {"override": registry.override},
                "torchtitan.models": {}, "torchtitan.models.common": {},
                "torchtitan.models.common.token_dispatcher": {
                    "BaseEPTokenDispatcher": base, "AllToAllTokenDispatcher": all_to_all}}
    with without_modules("torchtitan", "switchyard.torchtitan"):
        for name, attributes in contents.items():
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(attributes)
        yield importlib.import_module("switchyard.torchtitan"), registry, all_to_all, padded


class Problem:
    """The tokens of all ranks, all experts, and what one process computes in f64."""

    def __init__(self, tokens, num_experts, score_before_experts=False):
        random = torch.Generator().manual_seed(11)
        total = sum(tokens)
        self.first = [sum(tokens[:rank]) for rank in range(len(tokens) + 1)]
        self.num_experts = num_experts
        self.ids = torch.rand(total, num_experts, generator=random).topk(K, 1).indices
        self.x = torch.randn(total, D, generator=random)
        self.d_out = torch.randn(total, D, generator=random)
        self.scores = torch.rand(total, K, generator=random)
        self.weights = [torch.randn(num_experts, *shape, generator=random) * shape[1]**-0.5
                        for shape in ((F, D), (D, F), (F, D))]
        self.score_before_experts = score_before_experts

    def alone(self):
        x, scores, *weights = (leaf(t.double()) for t in (self.x, self.scores, *self.weights))
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, k = (self.ids == expert).nonzero(as_tuple=True)
            score = scores[token, k].unsqueeze(1)
            rows = x[token] * score if self.score_before_experts else x[token]
            rows = run_expert(rows, *(w[expert] for w in weights))
            out = out.index_add(0, token, rows if self.score_before_experts else rows * score)
        out.backward(self.d_out.double())
        return out.detach(), x.grad, scores.grad, [w.grad for w in weights]


def leaf(tensor):
    return tensor.clone().requires_grad_()


def run_expert(rows, w1, w2, w3):
    return (torch.nn.functional.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T


def run_experts(rows, counts, w1_EFD, w2_EDF, w3_EFD):
    """Computes like GroupedExperts, whose offsets are sums of the counts."""
    parts = rows.split(counts.tolist())
    return torch.cat([run_expert(part, *w) for part, *w in zip(parts, w1_EFD, w2_EDF, w3_EFD)]
                     or [rows])


def assert_near(ours, alone, name):
    error = torch.linalg.vector_norm(ours.double() - alone)
    norm = torch.linalg.vector_norm(alone)
    assert error <= TOLERANCE * norm, f"{name}: off by {error / norm:.1e}"


def compare(dispatcher, problem, rank, own, pad_multiple=1):
    """One forward and backward of a rank beside one process."""
    part = slice(problem.first[rank], problem.first[rank + 1])
    ids, x, scores = problem.ids[part], leaf(problem.x[part]), leaf(problem.scores[part])
    weights = [leaf(w[own]) for w in problem.weights]
    local_counts = torch.bincount(ids.flatten(), minlength=problem.num_experts)
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids, local_counts)
    picks = torch.bincount(problem.ids.flatten(), minlength=problem.num_experts)[own]
    assert counts.tolist() == (-(-picks // pad_multiple) * pad_multiple).tolist()
    assert counts.dtype == torch.int64 and rows.shape == (counts.sum(), D)
    for expert, group in enumerate(rows.split(counts.tolist())):
        assert not group[picks[expert]:].any()
    out = dispatcher.combine(run_experts(rows, counts, *weights), metadata, x)
    out.backward(problem.d_out[part])
    expected, d_x, d_scores, d_weights = problem.alone()
    assert_near(out, expected[part], "out")
    assert_near(x.grad, d_x[part], "d_x")
    assert_near(scores.grad, d_scores[part], "d_scores")
    for name, ours, alone in zip(("d_w1", "d_w2", "d_w3"), weights, d_weights):
        if len(ours) > 0:  # without experts there is nothing that run_experts would use
            assert_near(ours.grad, alone[own], name)


def ep_mesh_of(group):
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))


def equals_alone(group, form, pad_multiple=None, score_before_experts=False):
    tokens, num_experts = FORMS[form]
    problem = Problem(tokens[:group.size()], num_experts, score_before_experts)
    with stubbed() as (titan, registry, all_to_all, padded):
        options = dict(num_experts=num_experts, top_k=K,
                       score_before_experts=score_before_experts)
        config = (all_to_all.Config(**options) if pad_multiple is None else
                  padded(**options, pad_multiple=pad_multiple))
        config = registry.apply(TARGET, config, timeout=60)
        dispatcher = titan.TokenDispatcher(config)
        dispatcher.wire_meshes(ep_mesh=ep_mesh_of(group))
        own = dispatcher._experts.placement.experts_of(group.rank())
        for _ in range(2):  # the second step finds memory of the first
            compare(dispatcher, problem, group.rank(), own, pad_multiple or 1)
        dispatcher._experts.close()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_one_process(workers, size, form):
    workers.run(size, equals_alone, form)


@pytest.mark.parametrize("size", [2, 4])
def test_padding_is_counted_and_zero(workers, size):
    workers.run(size, equals_alone, "uneven", 8)


@pytest.mark.parametrize("size", [2, 4])
def test_scores_before_experts(workers, size):
    workers.run(size, equals_alone, "uneven", None, True)
    workers.run(size, equals_alone, "uneven", 8, True)


@pytest.mark.parametrize("score_before_experts", [False, True])
@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_without_a_mesh_all_experts_are_here(pad_multiple, score_before_experts):
    problem = Problem((9, 4), 6, score_before_experts)
    problem.first = [0, 13]
    with stubbed() as (titan, *_):
        dispatcher = titan.TokenDispatcher(titan.TokenDispatcher.Config(
            num_experts=6, top_k=K, pad_multiple=pad_multiple,
            score_before_experts=score_before_experts))
        compare(dispatcher, problem, 0, slice(None), pad_multiple)
        dispatcher.wire_meshes(ep_mesh=None)
        compare(dispatcher, problem, 0, slice(None), pad_multiple)


def compiles(group):
    problem = Problem(FORMS["uneven"][0][:group.size()], 8)
    with stubbed() as (titan, *_):
        dispatcher = titan.TokenDispatcher(titan.TokenDispatcher.Config(
            num_experts=8, top_k=K, timeout=60))
        dispatcher.wire_meshes(ep_mesh=ep_mesh_of(group))

        def layer(x, scores, ids):
            rows, counts, metadata = dispatcher.dispatch(x, scores, ids, None)
            return dispatcher.combine(rows.sin(), metadata, x), counts

        part = slice(problem.first[group.rank()], problem.first[group.rank() + 1])
        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            x, scores = leaf(problem.x[part]), leaf(problem.scores[part])
            out, counts = function(x, scores, problem.ids[part])
            out.backward(problem.d_out[part])
            results.append((out, counts, x.grad, scores.grad))
        for eager, compiled in zip(*results):
            assert torch.equal(eager, compiled)
        dispatcher._experts.close()


def test_blocks_compile_as_one_graph(workers):
    """TorchTitan compiles every block with fullgraph."""
    workers.run(2, compiles)


def test_unknown_options_are_errors():
    with stubbed() as (titan, registry, all_to_all, padded):
        config = padded(num_experts=4, top_k=2, pad_multiple=16)
        replaced = registry.apply(TARGET, config)
        assert type(replaced) is titan.TokenDispatcher.Config
        assert (replaced.num_experts, replaced.top_k, replaced.pad_multiple) == (4, 2, 16)
        config.surprise = "unlike any other"
        with pytest.raises(NotImplementedError, match="surprise='unlike any other'"):
            registry.apply(TARGET, config)


class Hidden:
    """Finds no torchtitan, whether it is installed or not."""

    @staticmethod
    def find_spec(name, _path=None, _target=None):
        if name == "torchtitan":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_torchtitan_there_is_the_class(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Hidden, *sys.meta_path])
    with without_modules("torchtitan", "switchyard.torchtitan"), warnings.catch_warnings():
        warnings.simplefilter("error")
        titan = importlib.import_module("switchyard.torchtitan")
        dispatcher = titan.TokenDispatcher(titan.TokenDispatcher.Config(num_experts=5, top_k=K))
        dispatcher.wire_meshes(ep_mesh=None)
        compare(dispatcher, Problem((7,), 5), 0, slice(None))


def test_a_torchtitan_without_dispatchers_is_named(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.2")
    with without_modules("torchtitan", "switchyard.torchtitan"):
        sys.modules["torchtitan"] = types.ModuleType("torchtitan")
        sys.modules["torchtitan.config"] = types.ModuleType("torchtitan.config")
        with pytest.warns(RuntimeWarning, match="not registered with torchtitan 0.2.2.*override"):
            titan = importlib.import_module("switchyard.torchtitan")
        assert titan.TokenDispatcher.Config(num_experts=4, top_k=2).pad_multiple == 1


def same_as_theirs(group):
    """TorchTitan's experts with our dispatcher, where TorchTitan has put it, and with its own."""
    from torchtitan.config import OverrideConfig, apply_overrides
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    import switchyard.torchtitan as titan

    set_spmd_backend("partial_dtensor")
    tokens, num_experts = FORMS["uneven"]
    problem = Problem(tokens[:group.size()], num_experts)
    part = slice(problem.first[group.rank()], problem.first[group.rank() + 1])
    each = num_experts // group.size()
    own = range(group.rank() * each, (group.rank() + 1) * each)
    results = []
    for imports, kind in (([], AllToAllTokenDispatcher),
                          ([(TARGET, {"timeout": 60})], titan.TokenDispatcher)):
        config = RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=each),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=K))
        apply_overrides(OverrideConfig(imports=imports), config)
        block = config.build()
        assert type(block.token_dispatcher) is kind
        block.token_dispatcher.wire_meshes(ep_mesh=ep_mesh_of(group))
        compare(block.token_dispatcher, problem, group.rank(), own)  # in f32
        with torch.no_grad():
            for parameter, weight in zip(block.inner_experts.parameters(), problem.weights):
                parameter.copy_(weight[own])
        ids, x, scores = problem.ids[part], leaf(problem.x[part]), leaf(problem.scores[part])
        counts = torch.bincount(ids.flatten(), minlength=num_experts)
        out = block(x.unsqueeze(0), scores.unsqueeze(0), ids.unsqueeze(0), counts)  # in bf16
        out.backward(problem.d_out[part].unsqueeze(0))
        results.append([out, x.grad, scores.grad, *(p.grad for p in block.parameters())])
    for index, (theirs, ours) in enumerate(zip(*results)):
        assert_near(ours, theirs.double(), f"tensor {index} of TorchTitan's")
    block.token_dispatcher._experts.close()


@pytest.mark.parametrize("size", [2, 4])
def test_the_package_itself(workers, size):
    try:
        import torchtitan.models.common.token_dispatcher  # noqa: F401
    except ImportError as error:
        pytest.skip(f"there is no torchtitan 0.3.0 or later here: {error}")
    workers.run(size, same_as_theirs)
