#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times experts_implementation="switchyard" of Hugging Face transformers on a GPU.

experts  plan, experts, combine and their backward through transformers' Qwen3-MoE experts, with a
         given routing, beside the same stages called from C (as in gpu_compare), in one run
layer    a whole Qwen3-MoE decoder layer, forward+backward, beside grouped_mm, eager and compiled,
         with peak memory
decode   the forward of the same layer with few tokens, eager and in CUDA graphs, beside grouped_mm
         and batched_mm

Sizes are those of Qwen3-30B-A3B, in bf16. Times are medians, cool / hot, taken as in
gpu_compare.py.
"""
import argparse
import datetime
import json

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (Qwen3MoeDecoderLayer,
                                                              Qwen3MoeExperts,
                                                              Qwen3MoeRotaryEmbedding)

import switchyard.torch
from gpu_layers import Batch, Switchyard, Weights, load_library, route
from gpu_report import pair
from gpu_shapes import SHAPES
from gpu_timing import measure

SHAPE = SHAPES["qwen3-30b"]
SEQUENCES, LENGTH = 4, 4096
DECODE_TOKENS = (1, 8, 64)


def config_of(implementation):
    _, h, i, e, k = SHAPE
    config = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=e,
                            num_experts_per_tok=k, norm_topk_prob=True, num_attention_heads=32,
                            num_key_value_heads=4, head_dim=128, num_hidden_layers=1,
                            hidden_act="silu", mlp_only_layers=[], decoder_sparse_step=1,
                            intermediate_size=6144, vocab_size=64)
    config._attn_implementation = "sdpa"
    config._experts_implementation = implementation
    return config


def peak_mib(run):
    """Returns the peak memory of a run beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class HuggingFaceExperts:
    """transformers' experts on a given batch."""

    def __init__(self, weights, batch):
        self.module = Qwen3MoeExperts(config_of("switchyard"))
        self.module.gate_up_proj = torch.nn.Parameter(weights.gate_up)
        self.module.down_proj = torch.nn.Parameter(weights.down)
        self.ids, self.d_y = batch.ids, batch.d_y
        self.x = batch.x.detach().requires_grad_()
        self.weights = batch.weights.detach().requires_grad_()

    def step(self):
        self.x.grad = self.weights.grad = None
        self.module.zero_grad(set_to_none=True)
        self.module(self.x, self.ids, self.weights).backward(self.d_y)

    def forward(self):
        with torch.no_grad():
            self.module(self.x, self.ids, self.weights)


def experts(options):
    torch.manual_seed(0)
    weights, batch = Weights(SHAPE), Batch(SHAPE, route(SHAPE))
    theirs = HuggingFaceExperts(weights, batch)
    rows = []
    with Switchyard(load_library(options.library), weights, batch, options) as ours:
        ours.step()
        theirs.step()
        for name, a, b in (("d_x", theirs.x.grad, ours.d_x),
                           ("d_gate_up", theirs.module.gate_up_proj.grad, ours.d_gate_up)):
            if not torch.equal(a, b):
                raise SystemExit(f"{name} differs between Python and C")
        for name in ("forward", "step"):
            from_c = measure(getattr(ours, name), options.rounds)
            from_python = measure(getattr(theirs, name), options.rounds)
            again = measure(getattr(ours, name), options.rounds)
            ratio = {heat: from_python[heat] / ((from_c[heat] + again[heat]) / 2)
                     for heat in from_c}
            rows.append({"part": name, "c": from_c, "python": from_python, "ratio": ratio})
    syncs = switchyard.torch.host_syncs("cuda")
    print("\n| qwen3-30b | from C, ms | transformers, ms | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['part']} | {pair(row['c'])} | {pair(row['python'])} | "
              f"{row['ratio']['cool']:.3f} / {row['ratio']['hot']:.3f} |")
    print(f"host syncs: {syncs}; peak of a step {peak_mib(theirs.step):.0f} MiB")
    return rows


class Layer:
    """A decoder layer with its inputs."""

    def __init__(self, implementation, sequences, length, compiled=False, state=None):
        config = config_of(implementation)
        with torch.device("cuda"):
            self.layer = Qwen3MoeDecoderLayer(config, 0).to(torch.bfloat16)
            rotary = Qwen3MoeRotaryEmbedding(config)
            self.x = torch.randn(sequences, length, config.hidden_size, dtype=torch.bfloat16)
            self.d_y = torch.randn_like(self.x)
            positions = torch.arange(length)[None].expand(sequences, -1)
        if state is None:
            for parameter in self.layer.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1]**-0.5)
        else:
            self.layer.load_state_dict(state)
        self.x.requires_grad_()
        self.embeddings = rotary(self.x, positions)
        self.run = torch.compile(self.layer) if compiled else self.layer

    def forward(self):
        with torch.no_grad():
            return self.call()

    def call(self):
        y = self.run(self.x, position_embeddings=self.embeddings, attention_mask=None)
        return y[0] if isinstance(y, tuple) else y

    def step(self):
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)
        self.call().backward(self.d_y)

    def captured(self):
        """Captures the forward as a CUDA graph, and returns a function that replays it."""
        self.forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.y = self.forward()
        return graph.replay


def layer(options):
    rows, state = [], None
    for implementation, compiled in (("grouped_mm", False), ("grouped_mm", True),
                                     ("switchyard", False), ("switchyard", True)):
        name = implementation + (", compiled" if compiled else "")
        model = Layer(implementation, SEQUENCES, LENGTH, compiled, state)
        state = model.layer.state_dict() if state is None else state
        model.step()
        rows.append({"name": name, "step": measure(model.step, options.rounds),
                     "peak": peak_mib(model.step)})
        del model
        torch.cuda.empty_cache()
    print(f"\n| decoder layer, {SEQUENCES} x {LENGTH} tokens | forward+backward, ms | peak, MiB |"
          "\n|---|---|---|")
    for row in rows:
        print(f"| {row['name']} | {pair(row['step'])} | {row['peak']:.0f} |", flush=True)
    return rows


def decode(options):
    rows, state = [], None
    for implementation in ("grouped_mm", "batched_mm", "switchyard"):
        for tokens in DECODE_TOKENS:
            model = Layer(implementation, tokens, 1, state=state)
            state = model.layer.state_dict() if state is None else state
            model.forward()
            row = {"name": implementation, "tokens": tokens, "peak": peak_mib(model.forward),
                   "eager": measure(model.forward, options.rounds),
                   "graph": measure(model.captured(), options.rounds)}
            rows.append(row)
            del model
            torch.cuda.empty_cache()
    print("\n| forward of a decoder layer | T | eager, us | in a graph, us | peak, MiB |"
          "\n|---|---|---|---|---|")
    for row in rows:
        eager, graph = (pair({h: 1000 * t for h, t in row[k].items()}) for k in ("eager", "graph"))
        print(f"| {row['name']} | {row['tokens']} | {eager} | {graph} | {row['peak']:.0f} |",
              flush=True)
    return rows


def main():
    parts = {"experts": experts, "layer": layer, "decode": decode}
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/gpu/bench/libswitchyard_gpu_compare.so",
                        help="of gpu_compare")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(parts))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    options.alignment, options.kernels = 1, "best"
    everything = {"date": str(datetime.date.today()), "gpu": torch.cuda.get_device_name(),
                  "torch": torch.__version__}
    print(", ".join(everything.values()) + "; bf16, cool / hot", flush=True)
    for part in options.only:
        everything[part] = parts[part](options)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
