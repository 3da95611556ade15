#!/usr/bin/env python3
"""Draws the comparison that gpu_compare.py --json wrote: gpu_chart.py RESULTS.json CHART.svg

The bars show the TFLOP/s of forward and backward, cool, and their dark parts the same when hot. The
line is a dense product, cool.
"""
import json
import sys
from xml.sax.saxutils import escape

from gpu_report import OURS, step_flops, tflops

WIDTH, LEFT, RIGHT = 820, 140, 250
BAR, GAP, BETWEEN, TOP, BOTTOM = 16, 4, 22, 64, 30
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.bold { font-weight: 600 }
.axis { stroke: #d0d7de }
.dense { stroke: #24292f; stroke-dasharray: 3 2 }
.other { fill: #8c959f } .ours { fill: #0969da }
.cool { opacity: .45 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #8d96a0 }
  .axis { stroke: #3d444d } .dense { stroke: #e6edf3 }
  .other { fill: #8d96a0 } .ours { fill: #4493f8 }
}
"""


def chart(everything):
    """Returns an SVG of everything["compare"]."""
    results = everything["compare"]
    most = max(layer["ceiling"]["cool"] for r in results for layer in r["layers"].values())
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [], TOP
    for result in results:
        begin = y
        for label, layer in result["layers"].items():
            parts += bar(label, y, tflops(step_flops(result["sizes"]), layer["step"]), scale)
            y += BAR + GAP
        x = LEFT + scale * result["layers"][OURS]["ceiling"]["cool"]
        parts.append(f'<line class="dense" x1="{x:.1f}" y1="{begin - 3}" x2="{x:.1f}" y2="{y}"/>')
        middle = (begin + y - GAP) / 2 + 5
        parts.append(text(LEFT - 12, middle, result["shape"], "bold", "end"))
        y += BETWEEN
    height = y + BOTTOM - BETWEEN
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{y - BETWEEN}"/>')
    head = [text(LEFT, 22, "Forward and backward of an MoE layer, TFLOP/s", "bold"),
            text(LEFT, 42, "pale: cool; dark: hot, limited by power; dashed: a dense product, cool",
                 "small"),
            text(LEFT, height - 8,
                 f"{everything['gpu']}, bf16, torch {everything['torch']}, {everything['date']}",
                 "small")]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                      f'viewBox="0 0 {WIDTH} {height}">', f"<style>{STYLE}</style>",
                      *head, *parts, "</svg>", ""])


def bar(label, y, rates, scale):
    kind = "ours" if label == OURS else "other"
    end = LEFT + scale * max(rates.values())
    return [f'<rect class="{kind} {heat}" x="{LEFT}" y="{y}" width="{scale * rates[heat]:.1f}" '
            f'height="{BAR}"/>' for heat in rates] + \
           [text(max(end + 8, WIDTH - RIGHT + 14), y + BAR - 3,
                 f"{label} {rates['cool']:.0f} / {rates['hot']:.0f}",
                 "bold" if label == OURS else "small")]


def text(x, y, words, kind, anchor="start"):
    return f'<text class="{kind}" x="{x}" y="{y:.0f}" text-anchor="{anchor}">{escape(words)}</text>'


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        everything = json.load(file)
    with open(sys.argv[2], "w") as file:
        file.write(chart(everything))


if __name__ == "__main__":
    main()
