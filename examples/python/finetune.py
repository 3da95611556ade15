# SPDX-License-Identifier: Apache-2.0
"""Finetunes a tiny Qwen3-MoE with Switchyard's experts, generates with it, saves and loads it.

    python examples/python/finetune.py          # about ten seconds on a CPU

The model has random weights and trains on the bytes of this file, so nothing is downloaded. With
your own model, only the argument experts_implementation="switchyard" is new.
"""
import pathlib
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import switchyard.torch  # noqa: F401, registers "switchyard" with transformers

STEPS, BATCH, LENGTH = 40, 8, 64


def make_model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, intermediate_size=128,
                            moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=16, num_experts=8,
                            num_experts_per_tok=2, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config, experts_implementation="switchyard")


def train(model, text):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    random = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)
        ids = torch.stack([text[s:s + LENGTH] for s in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)


def main():
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
    model = make_model()
    train(model, text)
    prompt = text[None, :16]
    ids = model.eval().generate(prompt, max_new_tokens=24, do_sample=False)
    print("generated:", bytes(ids[0].tolist()))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder,
                                                      experts_implementation="switchyard")
        same = torch.equal(loaded.eval()(prompt).logits, model(prompt).logits)
    print("saved and loaded:", "the same logits" if same else "other logits")


if __name__ == "__main__":
    main()
