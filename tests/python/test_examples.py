# SPDX-License-Identifier: Apache-2.0
"""The examples, and the program in docs/python.md."""
import importlib.util
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def load(name):
    path = ROOT / "examples" / "python" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_finetune(monkeypatch, capsys):
    module = load("finetune")
    monkeypatch.setattr(module, "STEPS", 3)
    module.main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert losses[-1] < losses[0]
    assert "saved and loaded: the same logits" in printed


def test_layer(capsys):
    load("layer").main()
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]
    assert losses[-1] < 0.1 * losses[0]


def test_expert_parallel():
    program = ROOT / "examples" / "python" / "expert_parallel.py"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", program,
         "--steps", "3"], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", result.stdout)]
    assert losses[-1] < losses[0]
    assert "saved and loaded: the same logits" in result.stdout


def test_the_page_on_python(capsys):
    text = (ROOT / "docs" / "python.md").read_text()
    program, = (p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "run_ranks" in p)
    exec(program, {})
    assert capsys.readouterr().out == "[(10, 64), (11, 64), (12, 64), (13, 64)]\n"
