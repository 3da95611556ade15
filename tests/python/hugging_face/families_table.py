# SPDX-License-Identifier: Apache-2.0
"""Renders the outcomes of all families as a Markdown table."""

import dataclasses

from comparison import IMPLEMENTATION


@dataclasses.dataclass
class Row:
    """The outcome of all tests of one family."""

    form: object
    worst_error: float = 0.0
    fallback: str | None = None
    failures: list = dataclasses.field(default_factory=list)


def _result(row):
    if row.failures:
        return "fails: " + "; ".join(row.failures)
    if row.fallback:
        return f"falls back to grouped_mm: {row.fallback}"
    return None


def markdown(rows):
    """Returns a Markdown table with one line for all families that have the same form and the same outcome."""
    groups = {}
    for family, row in rows.items():
        groups.setdefault((row.form, _result(row)), []).append((family, row))

    lines = [
        f"Experts classes of transformers with `{IMPLEMENTATION}`, compared with `eager` in float32.",
        "",
        "| families | classes | activation | gate | weights | bias | norm | result |",
        "|---|--:|---|---|---|---|---|---|",
    ]
    for (form, result), members in sorted(groups.items(), key=lambda group: -len(group[1])):
        # A folder with two classes of one form appears once.
        names = list(dict.fromkeys(family.name for family, _ in members))
        classes = sum(not family.options for family, _ in members)
        if result is None:
            result = f"relative error {max(row.worst_error for _, row in members):.1e}"
        cells = [
            ", ".join(names),
            # A variant is no class of its own.
            str(classes) if classes else "–",
            f"`{form.act_fn}`",
            _gate(form),
            "(in, out)" if form.is_transposed else "(out, in)",
            "yes" if form.has_bias else "no",
            "after each expert" if form.has_post_expert_norm else "no",
            result,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _gate(form):
    if not form.has_gate:
        return "none"
    words = ["concatenated" if form.is_concatenated else "interleaved"]
    if form.own_apply_gate:
        constants = f" ({', '.join(form.gate_constants)})" if form.gate_constants else ""
        words.append(f"own `_apply_gate`{constants}")
    return ", ".join(words)
