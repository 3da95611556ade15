# SPDX-License-Identifier: Apache-2.0
"""Runs a tiny Qwen3-MoE under the features of PyTorch and PEFT that training and inference use."""

import copy

import pytest
import torch
from comparison import IMPLEMENTATION, assert_close, parameter_gradients, relative_error, run_experts
from peft import LoraConfig, get_peft_model
from tiny_models import build_model, token_ids
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("no_fallback")
runs = pytest.mark.usefixtures("implementation_runs")

# bfloat16 keeps 8 bits, and an experts layer rounds a few times in a row.
BFLOAT16_TOLERANCE = 2e-2


@pytest.fixture
def model():
    """A whole model that runs the implementation under test."""
    # Rows are multiples of 16 bytes in bfloat16 too, because grouped_mm demands it.
    model = build_model("Qwen3Moe", hidden_size=40, moe_intermediate_size=24)
    model.set_experts_implementation(IMPLEMENTATION)
    return model


@pytest.fixture
def experts(model):
    return model.model.layers[0].mlp.experts


def batch(experts, num_tokens=37, top_k=3, seed=2):
    """Returns x, ids and weights for the experts module."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, experts.hidden_dim, generator=generator)
    probabilities = torch.randn(num_tokens, experts.num_experts, generator=generator).softmax(dim=-1)
    weights, ids = probabilities.topk(top_k, dim=-1)
    return x, ids, weights


def gradient_like(x, seed=3):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.dtype)


def assert_equal_bits(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def model_step(model, ids=None):
    """Returns the logits and the gradients of all trainable parameters."""
    model.zero_grad(set_to_none=True)
    ids = token_ids() if ids is None else ids
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: g for name, g in parameter_gradients(model).items() if g is not None}
    return {"logits": output.logits.detach(), **gradients}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
class TestCompile:
    """torch.compile traces the implementation as one graph, and its backward pass as another."""

    @pytest.fixture(autouse=True)
    def fresh_dynamo(self, training):
        if training and IMPLEMENTATION == "grouped_mm":
            pytest.skip("transformers' grouped_mm reads its offsets in Python in the backward pass of float32")
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.fixture(autouse=True, params=["modules", "classes"])
    def what_dynamo_hands_over(self, request, monkeypatch):
        """Before 2.13 torch hands over classes where a function's result is taken for a constant."""
        if IMPLEMENTATION == "switchyard" and request.param == "classes":
            monkeypatch.setattr("switchyard.torch._hugging_face._COMPILES_MODULES", False)

    def test_experts(self, experts, training):
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        # The second number of tokens makes Dynamo trace again with a symbol for it; the third uses that graph.
        for num_tokens in (37, 23, 41):
            x, ids, weights = batch(experts, num_tokens)
            d_y = gradient_like(x) if training else None
            expected = run_experts(experts, "eager", x, ids, weights, d_y)
            with torch.set_grad_enabled(training):
                actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y, forward=compiled)
            assert_close(actual, expected)

    def test_decoder_layer(self, model, training):
        layer = model.model.layers[0]
        hidden = torch.randn(2, 11, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        positions = model.model.rotary_emb(hidden, torch.arange(11)[None])
        d_y = gradient_like(hidden)

        def step(forward):
            model.zero_grad(set_to_none=True)
            x = hidden.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = forward(x, position_embeddings=positions)
            if not training:
                return {"y": y}
            y.backward(d_y)
            return {"y": y.detach(), "x": x.grad, **parameter_gradients(layer)}

        model.set_experts_implementation("eager")
        expected = step(layer)
        model.set_experts_implementation(IMPLEMENTATION)
        assert_close(step(torch.compile(layer, fullgraph=True, backend="aot_eager")), expected)


@runs
class TestCheckpointing:
    """Recomputed activations give the same gradients bit for bit."""

    def test_experts(self, experts, implementation_runs):
        x, ids, weights = batch(experts)
        d_y = gradient_like(x)
        expected = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
        calls_before = len(implementation_runs)

        def forward(x, ids, weights):
            return checkpoint(experts, x, ids, weights, use_reentrant=False)

        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y, forward=forward)
        # The backward pass runs the module once more.
        assert len(implementation_runs) == calls_before + 2
        assert_equal_bits(actual, expected)

    def test_model(self, model):
        expected = model_step(model.train())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_equal_bits(model_step(model), expected)


@runs
def test_gradient_accumulation(model):
    """Gradients of two batches add up in place."""
    gradients = {}
    for implementation in ("eager", IMPLEMENTATION):
        model.set_experts_implementation(implementation)
        model.zero_grad(set_to_none=True)
        for seed in (2, 3):
            ids = token_ids(seed=seed)
            model(input_ids=ids, labels=ids).loss.backward()
        gradients[implementation] = parameter_gradients(model)
    assert_close(gradients[IMPLEMENTATION], gradients["eager"])

    second = model_step(model, token_ids(seed=3))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert relative_error(gradients[IMPLEMENTATION][name], second[name]) > 0.1


@runs
class TestAutocast:
    """Autocast to bfloat16 agrees with eager under the same autocast, and keeps eager's dtypes."""

    @pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=["x_f32", "x_bf16"])
    @pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["weights_f32", "weights_bf16"])
    def test_experts(self, experts, weight_dtype, x_dtype):
        experts = experts.to(weight_dtype)
        x, ids, weights = batch(experts)
        x = x.to(x_dtype)
        d_y = gradient_like(x)

        def forward(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return experts(*args)

        expected = run_experts(experts, "eager", x, ids, weights, d_y, forward=forward)
        actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y, forward=forward)
        assert {name: t.dtype for name, t in actual.items()} == {name: t.dtype for name, t in expected.items()}
        assert_close(actual, expected, BFLOAT16_TOLERANCE)

    @pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["weights_f32", "weights_bf16"])
    def test_moe_block(self, model, weight_dtype):
        """The router's output has the dtype that a real model gives the experts."""
        block = model.model.layers[0].mlp.to(weight_dtype)
        hidden = torch.randn(2, 11, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        results = {}
        for implementation in ("eager", IMPLEMENTATION):
            model.set_experts_implementation(implementation)
            model.zero_grad(set_to_none=True)
            x = hidden.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = block(x)
            y.backward(gradient_like(y))
            results[implementation] = {"y": y.detach(), "x.grad": x.grad, **parameter_gradients(block)}
        actual, expected = results[IMPLEMENTATION], results["eager"]
        assert actual["y"].dtype == expected["y"].dtype
        assert_close(actual, expected, BFLOAT16_TOLERANCE)


@runs
def test_bfloat16_without_autocast(model):
    """A module that is bfloat16 throughout is how most checkpoints load."""
    experts = model.model.layers[0].mlp.experts.to(torch.bfloat16)
    x, ids, weights = batch(experts)
    x = x.to(torch.bfloat16)
    weights = weights.to(torch.bfloat16)
    d_y = gradient_like(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
    assert all(actual[name].dtype == torch.bfloat16 for name in actual)
    assert_close(actual, expected, BFLOAT16_TOLERANCE)


@runs
def test_lora(model):
    """PEFT replaces the experts' parameters by parametrizations, which are tensors that autograd computes."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_parameters=targets, target_modules=[])
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(5)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Two layers have two targets each, and each target has an A and a B.
    assert len(adapters) == 8 and all("lora_" in name for name in adapters)
    before = model(input_ids=token_ids()).logits
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    base = model.get_base_model()
    base.set_experts_implementation("eager")
    expected = model_step(model)
    base.set_experts_implementation(IMPLEMENTATION)
    actual = model_step(model)

    assert actual.keys() == {"logits", *adapters}
    assert relative_error(actual["logits"], before) > 1e-2
    assert_close(actual, expected)


@runs
@pytest.mark.parametrize("trainable", [(), ("down_proj",), ("gate_up_proj",)], ids=["none", "down", "gate_up"])
def test_frozen_experts(experts, trainable):
    """Frozen parameters get no gradient; x and the others get the same as ever."""
    x, ids, weights = batch(experts)
    d_y = gradient_like(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(name in trainable)
        if name not in trainable:
            del expected[f"{name}.grad"]
    actual = run_experts(experts, IMPLEMENTATION, x, ids, weights, d_y)
    for name, _ in experts.named_parameters():
        if name not in trainable:
            assert actual.pop(f"{name}.grad") is None
    assert actual["x.grad"] is not None
    assert_close(actual, expected)


@runs
def test_only_parameters_need_gradients(experts):
    """The first layer of a model with frozen embeddings sees an x that needs no gradient."""
    x, ids, weights = batch(experts)
    d_y = gradient_like(x)
    expected = run_experts(experts, "eager", x, ids, weights, d_y)
    experts.zero_grad(set_to_none=True)
    experts.config._experts_implementation = IMPLEMENTATION
    experts(x, ids, weights).backward(d_y)
    assert x.grad is None and weights.grad is None
    gradients = {f"{name}.grad": g for name, g in parameter_gradients(experts).items()}
    assert_close(gradients, {name: expected[name] for name in gradients})


@runs
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(experts, mode):
    """Evaluation without autograd gives the output of training, with a fresh x and with one that exists outside."""
    x, ids, weights = batch(experts)
    expected = run_experts(experts, "eager", x, ids, weights)["y"]
    experts.config._experts_implementation = IMPLEMENTATION
    experts.eval()
    with mode():
        for tokens in (x, x.clone()):
            y = experts(tokens, ids, weights)
            assert not y.requires_grad
            assert relative_error(y, expected) <= 1e-5


@runs
def test_parameters_may_change_between_calls(experts):
    """An optimiser writes into parameters, and load_state_dict and .data replace what they hold."""
    x, ids, weights = batch(experts)
    run_experts(experts, IMPLEMENTATION, x, ids, weights)
    with torch.no_grad():
        experts.down_proj.mul_(-2)
        experts.gate_up_proj.data = copy.deepcopy(experts.gate_up_proj.data) * 0.5
    expected = run_experts(experts, "eager", x, ids, weights)
    assert_close(run_experts(experts, IMPLEMENTATION, x, ids, weights), expected)


@runs
def test_arguments_need_not_be_contiguous(experts):
    """Slices and transposes of larger tensors arrive from parallel plans and from hand-written models."""
    x, ids, weights = batch(experts)
    expected = run_experts(experts, "eager", x, ids, weights)["y"]
    experts.config._experts_implementation = IMPLEMENTATION
    with torch.no_grad():
        wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]
        assert not wide.is_contiguous()
        y = experts(wide, ids.t().contiguous().t(), weights.t().contiguous().t())
        assert relative_error(y, expected) <= 1e-5

    ids_before = ids.clone()
    experts(x, ids, weights).sum().backward()
    assert torch.equal(ids, ids_before)

    # The gradient of a sum is an expanded scalar, whose strides are zero.
    actual = {name: g.clone() for name, g in parameter_gradients(experts).items()}
    reference = run_experts(experts, "eager", x, ids, weights, torch.ones_like(x))
    assert_close(actual, {name: reference[f"{name}.grad"] for name in actual})


class ScaledSwish(torch.nn.Module):
    """An activation of no name, with a constant of its own."""

    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.skipif(IMPLEMENTATION != "switchyard", reason="other implementations look at nothing")
@pytest.mark.parametrize("act_fn, expected", [
    (torch.nn.GELU(approximate="tanh"), "GEGLU_TANH"),
    (torch.nn.GELU(), "GEGLU"),
    (ScaledSwish(1.0), "SWIGLU"),
    (ScaledSwish(1.7), None),
    (torch.nn.Hardtanh(-10, 10), None),
    (torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Threshold(-1, 0), torch.nn.Hardtanh(-1, 10)), None),
])
def test_activation_is_what_the_module_computes(act_fn, expected):
    """The class of an activation does not say which constants it has."""
    from switchyard.torch._hugging_face import _form_of

    experts = build_model("Qwen3Moe").model.layers[0].mlp.experts
    experts.act_fn = act_fn
    form = _form_of(experts)
    assert (form and form[0].name) == expected
