# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny Qwen3-MoE whose experts are divided over ranks, and saves it.

    torchrun --nproc-per-node 4 examples/python/expert_parallel.py     # half a minute on a CPU

Ranks form a mesh of dp × ep: experts are divided over ep, and FSDP2 shards everything over dp. With
a GPU for each rank, set DEVICE to "cuda".
"""
import argparse
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import switchyard.torch as st

DEVICE = "cpu"
BATCH, LENGTH = 4, 64


def make_model():
    torch.manual_seed(0)  # the same weights on all ranks
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, intermediate_size=128,
                            moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=16, num_experts=8,
                            num_experts_per_tok=2, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config).to(DEVICE)


def parallelize(model, mesh):
    st.apply_expert_parallel(model, mesh["ep"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def train(model, text, steps):
    optimizer = torch.optim.AdamW(st.parameter_groups(model), lr=3e-3)
    random = torch.Generator().manual_seed(dist.get_rank())  # different tokens on every rank
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)
        ids = torch.stack([text[s:s + LENGTH] for s in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        st.reduce_gradients(model)  # averages over the ranks that experts are divided over
        st.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.2f}", flush=True)


def save_and_load(model, folder):
    """Saves a checkpoint of global tensors, and loads it into an unmodified model on each rank."""
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    whole = make_model()
    parameters = whole.state_dict()
    dcp.load(parameters, checkpoint_id=folder, no_dist=True)
    whole.load_state_dict(parameters)
    return whole


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group()
    size = dist.get_world_size()
    ep = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh(DEVICE, (size // ep, ep), mesh_dim_names=("dp", "ep"))
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()), device=DEVICE)
    model = make_model()
    parallelize(model, mesh)
    train(model, text, options.steps)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    whole = save_and_load(model, folder[0])
    ids = text[None, :LENGTH]
    ours, alone = model(ids).logits, whole(ids).logits
    if dist.get_rank() == 0:
        print("saved and loaded:", "the same logits" if torch.allclose(ours, alone, atol=1e-4)
              else "other logits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
