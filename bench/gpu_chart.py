#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the comparison that runs of gpu_compare.py --json wrote:

  gpu_chart.py RESULTS.json … CHART.svg

The bars show the TFLOP/s of forward and backward, cool, and their dark parts the same when hot. The
lines are a dense product and the layer's floor, cool.
"""
import sys
from xml.sax.saxutils import escape

from gpu_floors import step_flops
from gpu_report import OURS, floor_of, label_of, load_runs, merged, tflops

WIDTH, LEFT, RIGHT = 850, 170, 250
BAR, GAP, BETWEEN, TOP, BOTTOM = 13, 3, 13, 64, 30
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.bold { font-weight: 600 }
.axis { stroke: #d0d7de }
.dense { stroke: #24292f; stroke-dasharray: 3 2 }
.floor { stroke: #cf222e }
.other { fill: #8c959f } .ours { fill: #0969da }
.cool { opacity: .45 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #8d96a0 }
  .axis { stroke: #3d444d } .dense { stroke: #e6edf3 }
  .floor { stroke: #f85149 } .other { fill: #8d96a0 } .ours { fill: #4493f8 }
}
"""


def chart(runs):
    """Returns an SVG of what the runs compared."""
    results = merged(runs)["compare"]
    most = max(result["ceilings"]["dense"]["up"]["cool"] for result in results)
    scale = (WIDTH - LEFT - RIGHT) / most
    parts, y = [], TOP
    for result in results:
        begin = y
        flops = step_flops(result["sizes"])
        for label, layer in result["layers"].items():
            parts += bar(label, y, tflops(flops, layer["step"]), scale)
            y += BAR + GAP
        limits = {"dense": result["ceilings"]["dense"]["up"],
                  "floor": tflops(flops, floor_of(result))}
        for kind, rate in limits.items():
            x = LEFT + scale * rate["cool"]
            parts.append(
                f'<line class="{kind}" x1="{x:.1f}" y1="{begin - 3}" x2="{x:.1f}" y2="{y}"/>')
        parts.append(text(LEFT - 12, (begin + y - GAP) / 2 + 5, label_of(result), "bold", "end"))
        y += BETWEEN
    height = y + BOTTOM - BETWEEN
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{y - BETWEEN}"/>')
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
                      f'viewBox="0 0 {WIDTH} {height}">', f"<style>{STYLE}</style>",
                      *captions(runs, height), *parts, "</svg>", ""])


def captions(runs, height):
    first = runs[0]
    dates = ", ".join(dict.fromkeys(run["date"] for run in runs))
    return [text(LEFT, 22, "Forward and backward of an MoE layer, TFLOP/s", "bold"),
            text(LEFT, 42, "pale: cool; dark: hot, limited by power; dashed: a dense product, "
                 "cool; red: the floor, cool", "small"),
            text(LEFT, height - 8, f"{first['gpu']}, bf16, torch {first['torch']}, {dates}",
                 "small")]


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
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with open(sys.argv[-1], "w", encoding="utf-8") as file:
        file.write(chart(load_runs(sys.argv[1:-1])))


if __name__ == "__main__":
    main()
