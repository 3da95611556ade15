#!/usr/bin/env python3
"""Times Switchyard's layer and torch's on the same inputs, in one run, and checks that they agree.

Torch runs TorchTitan's algorithm (argsort, gather, three torch._grouped_mm, weighted scatter-add),
as it is and under torch.compile. The routing is given, data are random, weights and their gradients
bf16 on both sides. Times are medians by events, each after a pause and warm-up rounds.
"""
import argparse
import ctypes
import datetime
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

SHAPES = {  # T, H, I, E, K
    "qwen3-30b": (16384, 2048, 768, 128, 8),
    "olmoe": (16384, 2048, 1024, 64, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
    "dsv3-slice": (4096, 7168, 2048, 32, 8),
}
TOLERANCE = 2e-2  # both sides round to bf16 at several places


class Torch(torch.nn.Module):
    """TorchTitan's experts over given picks."""

    def __init__(self, gate, up, down, num_experts, top_k):
        super().__init__()
        self.gate = torch.nn.Parameter(gate)
        self.up = torch.nn.Parameter(up)
        self.down = torch.nn.Parameter(down)
        self.num_experts = num_experts
        self.top_k = top_k

    def forward(self, x, weights, ids):
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = order // self.top_k
        counts = torch.histc(ids.view(-1).float(), bins=self.num_experts, min=0,
                             max=self.num_experts)
        offsets = torch.cumsum(counts, 0).to(torch.int32)
        rows = x[tokens]
        hidden = F.silu(torch._grouped_mm(rows, self.gate.transpose(-2, -1), offs=offsets))
        hidden = hidden * torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=offsets)
        out = torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=offsets)
        out = (out.float() * weights.view(-1)[order][:, None]).to(x.dtype)
        index = tokens[:, None].expand(-1, x.shape[1])
        return torch.zeros_like(x).scatter_add_(0, index, out)


class Switchyard:
    """The same through the library's functions of C."""

    def __init__(self, library, shape, gate_up, down, alignment):
        t, h, i, e, k = shape
        self.library = library
        sizes = (ctypes.c_int64 * 7)(t, h, i, e, k, alignment, 1)
        # 1 is CUDA's name for the default stream, which torch calls 0.
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream or 1)
        self.layer = library.switchyard_make(sizes, stream)
        if not self.layer:
            sys.exit("switchyard_make failed")
        self.gate_up, self.down = gate_up, down
        self.y = torch.empty(t, h, device="cuda", dtype=torch.bfloat16)
        self.d_x = torch.empty_like(self.y)
        self.d_weights = torch.empty(t, k, device="cuda")
        self.d_gate_up = torch.empty_like(gate_up)
        self.d_down = torch.empty_like(down)

    def call(self, function, tensors, *rest):
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        if function(ctypes.c_void_p(self.layer), pointers, *rest) != 0:
            sys.exit("a call of switchyard failed")

    def forward(self, x, weights, ids, training):
        self.call(self.library.switchyard_forward,
                  [x, ids, weights, self.gate_up, self.down, self.y], int(training))
        return self.y

    def backward(self, x, weights, d_y):
        self.call(self.library.switchyard_backward,
                  [x, weights, self.gate_up, self.down, d_y, self.d_x, self.d_weights,
                   self.d_gate_up, self.d_down])

    def host_syncs(self):
        return self.library.switchyard_host_syncs(ctypes.c_void_p(self.layer))

    def free(self):
        self.library.switchyard_free(ctypes.c_void_p(self.layer))


def median_ms(run, rounds):
    torch.cuda.synchronize()
    time.sleep(0.15)
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for i in range(rounds):
        run()
        events[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def distance(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def ceilings(shape, rounds):
    t, h, i, _, k = shape
    a = torch.randn(t * k, h, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2 * i, h, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(t * k, 2 * i, device="cuda", dtype=torch.bfloat16)
    gemm = median_ms(lambda: torch.mm(a, b.t(), out=out), rounds)
    big = torch.empty(1 << 29, device="cuda", dtype=torch.bfloat16).normal_()
    to = torch.empty_like(big)
    copy = median_ms(lambda: to.copy_(big), rounds)
    return 2 * t * k * h * 2 * i / gemm * 1e-9, 2 * big.numel() * 2 / copy * 1e-6


def compare(name, shape, library, arguments):
    t, h, i, e, k = shape
    torch.manual_seed(arguments.seed)
    x = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
    d_y = torch.randn(t, h, device="cuda", dtype=torch.bfloat16)
    scores, ids = torch.topk(torch.softmax(torch.randn(t, e, device="cuda"), -1), k)
    weights = (scores / scores.sum(-1, keepdim=True)).contiguous()
    ids32 = ids.to(torch.int32).contiguous()
    gate_up = torch.randn(e, 2 * i, h, device="cuda", dtype=torch.bfloat16) * h**-0.5
    down = torch.randn(e, h, i, device="cuda", dtype=torch.bfloat16) * i**-0.5

    ours = Switchyard(library, shape, gate_up, down, arguments.alignment)
    module = Torch(gate_up[:, :i].contiguous(), gate_up[:, i:].contiguous(), down.clone(), e, k)
    compiled = torch.compile(module) if not arguments.no_compile else None
    x_leaf = x.clone().requires_grad_()
    weights_leaf = weights.clone().requires_grad_()
    leaves = [x_leaf, weights_leaf, *module.parameters()]

    def torch_step(layer):
        for leaf in leaves:
            leaf.grad = None
        layer(x_leaf, weights_leaf, ids).backward(d_y)

    def torch_forward(layer):
        with torch.no_grad():
            layer(x_leaf, weights_leaf, ids)

    def our_step():
        ours.forward(x, weights, ids32, True)
        ours.backward(x, weights, d_y)

    y = module(x_leaf, weights_leaf, ids)
    y.backward(d_y)
    our_step()
    torch.cuda.synchronize()
    errors = {
        "y": distance(ours.y, y.detach()),
        "d_x": distance(ours.d_x, x_leaf.grad),
        "d_weights": distance(ours.d_weights, weights_leaf.grad),
        "d_gate": distance(ours.d_gate_up[:, :i], module.gate.grad),
        "d_up": distance(ours.d_gate_up[:, i:], module.up.grad),
        "d_down": distance(ours.d_down, module.down.grad),
    }
    del y
    wrong = {tensor: error for tensor, error in errors.items() if not error <= TOLERANCE}
    if wrong:
        sys.exit(f"{name}: the results differ: {wrong}")

    syncs = ours.host_syncs()
    our_step()
    syncs = ours.host_syncs() - syncs
    result = {"shape": name, "errors": errors, "host_syncs": syncs, "ms": {}}
    result["gemm_ceiling_tflops"], result["copy_ceiling_gb_s"] = ceilings(shape, arguments.rounds)
    runs = {"torch": module, "torch.compile": compiled}
    for label, layer in runs.items():
        if layer is None:
            continue
        result["ms"][label] = [
            median_ms(lambda: torch_forward(layer), arguments.rounds),
            median_ms(lambda: torch_step(layer), arguments.rounds),
        ]
    result["ms"]["switchyard"] = [
        median_ms(lambda: ours.forward(x, weights, ids32, False), arguments.rounds),
        median_ms(our_step, arguments.rounds),
    ]
    result["tflops"] = {label: [6 * t * k * h * i / ms[0] * 1e-9, 18 * t * k * h * i / ms[1] * 1e-9]
                        for label, ms in result["ms"].items()}
    ours.free()
    return result


def print_table(results):
    labels = list(results[0]["ms"])
    print("| T, H, I, E, K | dense GEMM ceiling | "
          + " | ".join(f"{label}: fwd / fwd+bwd" for label in labels) + " | faster than "
          + ", ".join(labels[:-1]) + " |")
    print("|---" * (len(labels) + 3) + "|")
    for r in results:
        cells = [f"{r['ms'][label][0]:.2f} / {r['ms'][label][1]:.2f} ms "
                 f"({r['tflops'][label][1]:.0f} TF)" for label in labels]
        ratios = ", ".join(f"{r['ms'][label][1] / r['ms']['switchyard'][1]:.2f}x"
                           for label in labels[:-1])
        sizes = ",".join(str(n) for n in SHAPES[r["shape"]])
        print(f"| {r['shape']} {sizes} | {r['gemm_ceiling_tflops']:.0f} TF | "
              + " | ".join(cells) + f" | {ratios} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/gpu/bench/libswitchyard_gpu_compare.so")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--alignment", type=int, default=1, help="of each expert's rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 10:
        parser.error(f"--rounds ({arguments.rounds}) must be at least 10")
    unknown = [name for name in arguments.shapes.split(",") if name not in SHAPES]
    if unknown:
        parser.error(f"--shapes: {unknown} is none of {list(SHAPES)}")
    library = ctypes.CDLL(arguments.library)
    library.switchyard_make.restype = ctypes.c_void_p
    library.switchyard_host_syncs.restype = ctypes.c_int64

    results = []
    for name in arguments.shapes.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(compare(name, SHAPES[name], library, arguments))
        torch.cuda.empty_cache()
    print(f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}; "
          f"median of {arguments.rounds}, bf16, routing given")
    print_table(results)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
