# SPDX-License-Identifier: Apache-2.0
"""Runs the program for Hugging Face models that the README shows."""

import re
from pathlib import Path

import torch
from comparison import TOLERANCE, relative_error
from tiny_models import build_model, token_ids

README = Path(__file__).parents[3] / "README.md"


def test_the_readmes_program(tmp_path, implementation_runs):
    expected = build_model("Mixtral")
    expected.save_pretrained(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    scope = {"name": tmp_path}
    exec(program, scope)
    with torch.no_grad():
        actual = scope["model"](input_ids=token_ids()).logits
        error = relative_error(actual, expected(input_ids=token_ids()).logits)
    assert error < TOLERANCE
    assert len(implementation_runs) == 2  # one call for each layer; the other model is transformers' own
