# SPDX-License-Identifier: Apache-2.0
"""Compares whole tiny language models with their eager experts, in float32."""

import pytest
import torch
import transformers
from comparison import IMPLEMENTATION, assert_close, parameter_gradients, relative_error
from tiny_models import MODEL_NAMES, build_model, token_ids

pytestmark = pytest.mark.usefixtures("implementation_runs")
for_each_model = pytest.mark.parametrize("name", MODEL_NAMES)
# Generating with OLMoE fails in transformers itself before 5.19, whatever runs its experts.
MODELS_THAT_GENERATE = [name for name in MODEL_NAMES if name != "Olmoe" or transformers.__version__ >= "5.19"]


def train_step(model, implementation):
    """Returns the logits, the loss and the gradient of every parameter."""
    model.set_experts_implementation(implementation)
    model.zero_grad(set_to_none=True)
    ids = token_ids()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    results = {"logits": output.logits.detach(), "loss": output.loss.detach()}
    results.update({f"{name}.grad": gradient for name, gradient in parameter_gradients(model).items()})
    return results


@for_each_model
def test_logits_loss_and_gradients(name):
    model = build_model(name).train()
    expected = train_step(model, "eager")
    # Every trainable parameter takes part, so that no comparison is one of nothing with nothing.
    assert all(expected[f"{n}.grad"].any() for n, p in model.named_parameters() if p.requires_grad)
    assert_close(train_step(model, IMPLEMENTATION), expected)


@for_each_model
def test_experts_matter(name):
    """The comparison above sees a wrong expert only where that expert changes the logits; most experts must."""
    model = build_model(name).eval()
    model.set_experts_implementation(IMPLEMENTATION)
    layers = [p for n, p in model.named_parameters() if n.endswith(".experts.down_proj")]
    assert layers
    with torch.no_grad():
        before = model(input_ids=token_ids()).logits
        for down_proj in layers:
            changes = []
            for expert in down_proj:
                expert.neg_()
                changes.append(relative_error(model(input_ids=token_ids()).logits, before))
                expert.neg_()
            assert sum(change > 1e-2 for change in changes) > len(changes) / 2, changes


@pytest.mark.parametrize("name", MODELS_THAT_GENERATE)
def test_generate(name):
    """Greedy decoding gives the same tokens."""
    model = build_model(name).eval()
    prompt = token_ids(length=5)
    generated = {}
    for implementation in ("eager", IMPLEMENTATION):
        model.set_experts_implementation(implementation)
        generated[implementation] = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
    assert generated["eager"].shape == (2, 13)
    assert torch.equal(generated[IMPLEMENTATION], generated["eager"])


@for_each_model
def test_save_and_load(name, tmp_path):
    """A model that from_pretrained reads back with the implementation has the logits that it had before."""
    model = build_model(name).eval()
    model.set_experts_implementation(IMPLEMENTATION)
    with torch.no_grad():
        expected = model(input_ids=token_ids()).logits
        model.save_pretrained(tmp_path)
        loaded_class = getattr(transformers, f"{name}ForCausalLM")
        loaded = loaded_class.from_pretrained(tmp_path, experts_implementation=IMPLEMENTATION).eval()
        assert loaded.config._experts_implementation == IMPLEMENTATION
        actual = loaded(input_ids=token_ids()).logits
    # The loaded parameters may lie at other alignments, where a kernel may sum in another order.
    assert relative_error(actual, expected) <= 1e-6
