# SPDX-License-Identifier: Apache-2.0
"""What each stage of a layer must compute and move, and how long that takes at measured speeds.

Every time, rate or share is a dict with the keys of HEATS.
"""
from typing import NamedTuple

HEATS = ("cool", "hot")
BF16 = 2  # bytes


def forward_flops(shape):
    t, h, i, _, k = shape
    return 6 * t * k * h * i


def step_flops(shape):
    return 3 * forward_flops(shape)


def saved_bytes_wanted(shape):
    """Returns the bytes to save per token: its x, and the gate and up halves of its K hidden
    rows."""
    _, h, i, _, k = shape
    return BF16 * (h + 2 * k * i)


def dense_sizes(shape):
    """Returns the dense products that bound a layer's own, as m, n, k of [m, k] × [k, n]. They
    differ in what they reduce over: H, I, 2I and the rows of an expert. The last one has the output
    of all experts' weight gradients and, like cuBLAS's fast kernels, wants a multiple of 8."""
    t, h, i, e, k = shape
    rows = t * k
    return {"up": (rows, 2 * i, h), "down": (rows, h, i), "up backward": (rows, h, 2 * i),
            "gradient": (e * 2 * i, h, max(rows // e // 8 * 8, 8))}


class Stage(NamedTuple):
    name: str
    flops: int
    dense: str | None  # which dense product bounds it
    bytes: int  # read or written, each once


def step_stages(shape, busy_experts):
    """Returns the stages of forward and backward. Rows between stages go through memory; tokens are
    read once although K rows are made of each. Only experts that have rows read their weights, but
    all of them write gradients. The plan's floor is not known and counts as nothing."""
    t, h, i, e, k = shape
    rows = t * k
    part = 2 * rows * h * i
    x, wide, activated, inner = t * h, rows * h, rows * i, rows * 2 * i
    down, d_down = busy_experts * h * i, e * h * i
    work = [("plan", 0, None, 0),
            ("up + activation", 2 * part, "up", x + 2 * down + inner + activated),
            ("down", part, "down", activated + down + wide),
            ("combine", 0, None, wide + x),
            ("down backward + activation", part, "up", x + down + 2 * inner + activated),
            ("down gradient", part, "gradient", x + activated + d_down),
            ("up gradient", 2 * part, "gradient", x + inner + 2 * d_down),
            ("up backward", 2 * part, "up backward", inner + 2 * down + wide),
            ("dispatch_backward", 0, None, wide + x)]
    return [Stage(name, flops, dense, BF16 * elements) for name, flops, dense, elements in work]


def stage_floor(stage, ceilings):
    """Returns the floor in ms, and what limits the stage when cool: memory or compute. `ceilings`
    has the dense products in TFLOP/s and a copy in GB/s."""
    memory = {heat: stage.bytes / ceilings["copy"][heat] * 1e-6 for heat in HEATS}
    if not stage.dense:
        return memory, "memory"
    dense = ceilings["dense"][stage.dense]
    compute = {heat: stage.flops / dense[heat] * 1e-9 for heat in HEATS}
    return ({heat: max(memory[heat], compute[heat]) for heat in HEATS},
            "memory" if memory["cool"] >= compute["cool"] else "compute")


def step_floor(shape, busy_experts, ceilings):
    """Returns the sum of the stages' floors, in ms."""
    floors = [stage_floor(stage, ceilings)[0] for stage in step_stages(shape, busy_experts)]
    return {heat: sum(floor[heat] for floor in floors) for heat in HEATS}


def forward_bytes(shape, busy_experts):
    """Returns the bytes of the weights of experts that have rows, of x and of y."""
    t, h, i, _, _ = shape
    return BF16 * (busy_experts * 3 * h * i + 2 * t * h)


def forward_floor(shape, busy_experts, bytes_per_s, flops_per_s):
    """Returns the time in ms that no forward can beat, and what limits it. The weights of experts
    that have rows, x and y must move once, and the products must be computed. Launches are free
    here, and so are intermediate rows, which need not leave the chip."""
    memory = forward_bytes(shape, busy_experts) / bytes_per_s * 1e3
    compute = forward_flops(shape) / flops_per_s * 1e3
    return max(memory, compute), "memory" if memory >= compute else "compute"
