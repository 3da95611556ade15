#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Estimates dispatch and combine on 8 GPUs from the bytes they move: scaling.py [CHART.svg]

Prints the tables of docs/scaling.md and draws its chart. Nothing here was measured on more than one
GPU; docs/scaling.md gives the source of each number.
"""
import sys
from math import comb

from gpu_chart import STYLE, text

GPUS = 8
SHAPES = {  # tokens per GPU, H, E, K
    "dsv3, 4096 tokens a GPU": (4096, 7168, 256, 8),
    "dsv3, 128 tokens a GPU": (128, 7168, 256, 8),
    "qwen3-30b, 2048 tokens a GPU": (2048, 2048, 128, 8),
}
LINK = 450e9  # bytes/s per direction: NVLink 4
SAME_GPUS = 319e9 * (GPUS - 1) / GPUS  # the rate that UCCL-EP reaches on 8 H200
MEMORY = 4.3e12  # bytes/s, reads plus writes: measured
MEETING = (5.0, 6.0)  # us: 4 measured on one GPU, plus 1 to 2 assumed for NVLink
BF16, F32, I32 = 2, 4, 4


def distinct_ranks(num_experts, top_k, ranks=GPUS):
    """Returns the expected number of ranks that a token goes to under uniform routing."""
    return ranks * (1 - comb(num_experts - num_experts // ranks, top_k) / comb(num_experts, top_k))


def bytes_of(shape):
    """Returns the bytes of one GPU: over the link in each direction, and through its memory."""
    tokens, hidden, num_experts, top_k = shape
    d, row, away = distinct_ranks(num_experts, top_k), BF16 * hidden, (GPUS - 1) / GPUS
    return {"dispatch": tokens * away * (d * (row + F32 * top_k) + I32 * top_k),
            "combine": tokens * away * top_k * row,
            "combine, sums": tokens * away * d * row,
            "dispatch, memory": tokens * (1 + d) * row,
            "combine, memory": tokens * (top_k + 1) * row,
            "adding first, memory": tokens * (top_k + d) * row}


def times_of(shape, link):
    """Returns times in us: over the link, through memory, and in meetings (least, most)."""
    b = bytes_of(shape)
    return {op: (b[op] / link * 1e6, b[f"{op}, memory"] / MEMORY * 1e6,
                 [meetings * us for us in MEETING])
            for op, meetings in (("dispatch", 2), ("combine", 1))}


def print_tables():
    for name, shape in SHAPES.items():
        print(f"{name}: D {distinct_ranks(*shape[2:]):.3f}")
        for what, count in bytes_of(shape).items():
            rate = MEMORY if what.endswith("memory") else LINK
            print(f"  {what:<22} {count / 1e6:9.2f} MB  {count / rate * 1e6:8.1f} us "
                  f"at {rate / 1e9:.0f} GB/s")
        for link in (LINK, SAME_GPUS):
            least = most = 0.0
            for op, (wire, memory, meetings) in times_of(shape, link).items():
                least += wire + meetings[0]
                most += wire + memory + meetings[1]
                print(f"  {op:<9} at {link / 1e9:.0f} GB/s: link {wire:.1f}, memory {memory:.1f}, "
                      f"meetings {meetings[0]:.0f}-{meetings[1]:.0f} us")
            print(f"  both      at {link / 1e9:.0f} GB/s: {least:.0f} us with memory behind the "
                  f"link, {most:.0f} us one after the other")


WIDTH, LEFT, TOP, BAR, SCALE = 820, 330, 70, 18, 0.25


def chart():
    """Draws 4096 tokens per GPU: our computed times beside another library's measured ones."""
    shape = SHAPES["dsv3, 4096 tokens a GPU"]
    b = bytes_of(shape)
    bars = [("dispatch, bf16: the link at 450 GB/s", b["dispatch"] / LINK, "ours"),
            ("dispatch, bf16: at 279 GB/s", b["dispatch"] / SAME_GPUS, "ours"),
            ("UCCL-EP dispatch, fp8: measured", 500e-6, "other"),
            None,
            ("combine, K rows: the link at 450 GB/s", b["combine"] / LINK, "ours"),
            ("combine, K rows: at 279 GB/s", b["combine"] / SAME_GPUS, "ours"),
            ("sums of ranks alone: at 450 GB/s", b["combine, sums"] / LINK, "ours"),
            ("UCCL-EP combine, sums: measured", 973e-6, "other")]
    parts, y = [], TOP
    for entry in bars:
        if entry:
            label, seconds, kind = entry
            us = seconds * 1e6
            heat = "cool " if kind == "ours" else ""
            parts += [text(LEFT - 10, y + 14, label, "small", "end"),
                      f'<rect class="{heat}{kind}" x="{LEFT}" y="{y}" width="{us * SCALE:.1f}" '
                      f'height="{BAR}"/>',
                      text(LEFT + us * SCALE + 8, y + 14, f"{us:.0f}", "small")]
        y += BAR + 6
    head = [text(20, 24, "Dispatch and combine on 8 GPUs with NVLink 4, µs", "bold"),
            text(20, 44, "4096 tokens a GPU, H 7168, 256 experts, 8 picks; "
                 "pale: computed from bytes, never run; grey: published, 8 H200", "small"),
            f'<line class="axis" x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{y}"/>']
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" '
                      f'viewBox="0 0 {WIDTH} {y + 10}">', f"<style>{STYLE}</style>", *head, *parts,
                      "</svg>", ""])


def main():
    print_tables()
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.write(chart())


if __name__ == "__main__":
    main()
