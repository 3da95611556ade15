#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a Qwen3-MoE block whose experts are divided over processes on one GPU, beside one process.

Run it with torchrun, under MPS. Each process is a rank with its part of the tokens, and rows move
through memory that all of them can reach. The script first compares every bit with that of one
process that has all tokens. Then it times a step, eager and as a CUDA graph, on the slowest rank.
Sizes are those of Qwen3-30B-A3B, in bf16. Times are medians, cool / hot, taken as in
gpu_compare.py.
"""
import argparse
import copy
import datetime
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import switchyard.torch
from gpu_report import pair
from gpu_shapes import SHAPES
from gpu_timing import measure
from gpu_torch import config_of

SHAPE = SHAPES["qwen3-30b"]
ROOM = 1.2  # capacity of a rank for rows and tokens, relative to a balanced routing


class Step:
    """Forward and backward of a module whose first input is the tokens."""

    def __init__(self, module, d_y, *inputs):
        self.module, self.d_y = module, d_y
        self.inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]

    def __call__(self):
        for tensor in self.inputs:
            tensor.grad = None
        self.module.zero_grad(set_to_none=True)
        self.y = self.module(*self.inputs)
        self.y.backward(self.d_y)

    @torch.no_grad()
    def set_inputs(self, inputs):
        for own, given in zip(self.inputs, inputs):
            own.copy_(given)

    def captured(self):
        # Its autograd graph would bring the stream that it was made on into the capture.
        self.y = None
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                self()
        torch.cuda.synchronize()
        self.y = None
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


@torch.no_grad()
def routed(block, x):
    """Returns tokens [T, H] with the picks and weights from the block's router. The bits of the
    experts are compared for one routing, because cuBLAS gives a token different bits when it is
    batched with other tokens."""
    _, weights, ids = block.gate(x)
    return x, ids, weights.float()


def make_block():
    torch.manual_seed(0)
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(config_of("switchyard")).to(torch.bfloat16)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1]**-0.5)
    return block


def differing(ours, alone, part):
    """Returns the tensors that differ between a rank's step of its experts and that of one
    process."""
    placement = ours.module.switchyard_experts.placement
    own = placement.experts_of(dist.get_rank())
    pairs = {"y": (ours.y, alone.y[part])}
    for name, a, b in zip(("d_x", "ids", "d_weights"), ours.inputs, alone.inputs):
        if a.grad is not None:
            pairs[name] = a.grad, b.grad[part]
    for name, parameter in ours.module.named_parameters():
        pairs[name] = (parameter.grad.to_local(),
                       getattr(alone.module, name).grad[own[0]:own[-1] + 1])
    return [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def longest(time):
    """Returns the longest time of all ranks."""
    time = torch.tensor(time)
    dist.all_reduce(time, op=dist.ReduceOp.MAX)
    return time.item()


def measure_together(run, rounds):
    return {heat: longest(time) for heat, time in measure(run, rounds, longest).items()}


def on_rank_0(function):
    """Runs a function on rank 0 while the others wait, and returns its result on all ranks."""
    result = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    t, h, _, _, k = SHAPE
    part = slice(rank * t // size, (rank + 1) * t // size)

    def random():
        return torch.randn(t, h, device="cuda", dtype=torch.bfloat16)

    block = make_block()
    whole = copy.deepcopy(block)
    x, d_y, other_x = random(), random(), random()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("ep",))
    switchyard.torch.apply_expert_parallel(block, mesh, timeout=60, token_capacity=int(ROOM * t),
                                           row_capacity=int(ROOM * t * k / size))
    experts = block.experts.switchyard_experts
    inputs, other_inputs = routed(whole, x), routed(whole, other_x)
    alone = Step(whole.experts, d_y, *inputs)
    ours = Step(block.experts, d_y[part], *(tensor[part] for tensor in inputs))
    alone()
    ours()
    before = experts.host_syncs()
    for _ in range(3):
        ours()
    syncs = experts.host_syncs() - before
    wrong = differing(ours, alone, part)
    replay = ours.captured()
    alone.set_inputs(other_inputs)
    ours.set_inputs([tensor[part] for tensor in other_inputs])
    alone()
    replay()
    torch.cuda.synchronize()
    found = [None] * size
    dist.all_gather_object(found, (wrong, differing(ours, alone, part), syncs))
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size} processes of "
              f"{t // size} tokens; bf16, cool / hot")
        print("bits of one process:", "all" if not any(w for w, _, _ in found) else found)
        print("a captured step with other tokens:",
              "all" if not any(w for _, w, _ in found) else found)
        print("host syncs of three steps:", [s for _, _, s in found], flush=True)

    rows = {}
    for name, step_alone, step in (
            ("experts", alone, ours),
            ("block", Step(whole, d_y[None], x[None]), Step(block, d_y[None, part], x[None, part]))):
        step_alone()
        step()
        dist.barrier()
        rows[f"{name}, one process"] = on_rank_0(lambda: measure(step_alone, options.rounds))
        rows[f"{name}, {size} processes"] = measure_together(step, options.rounds)
        dist.barrier()
        graph = step.captured()
        rows[f"{name}, {size} processes, graphs"] = measure_together(graph, options.rounds)
        dist.barrier()
    if rank == 0:
        print(f"\n| {t} tokens in all | forward+backward, ms | of one process |\n|---|---|---|")
        for name, times in rows.items():
            one = rows[name.split(",")[0] + ", one process"]
            ratio = {heat: times[heat] / one[heat] for heat in times}
            print(f"| {name} | {pair(times)} | {pair(ratio)} |", flush=True)
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump({"processes": size, "rows": rows, "found": found}, file, indent=1)
    dist.barrier()
    experts.close()
    dist.destroy_process_group()
    if any(w or r or s for w, r, s in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
