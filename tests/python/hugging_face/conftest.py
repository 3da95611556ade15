# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of Hugging Face models. SWITCHYARD_FAMILIES_TABLE names a file for the table of families."""

import os
import warnings
from pathlib import Path

import pytest

# OpenMP's threads spin while they wait, by default. On a busy machine that turns 4 seconds of tests into 75.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test needs the network, and none may wait for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from comparison import IMPLEMENTATION, FallbackWarning, counted_calls  # noqa: E402
from families_table import markdown  # noqa: E402


def pytest_report_header():
    return f"experts implementation: {IMPLEMENTATION}"


@pytest.fixture
def no_fallback():
    """Makes a fallback an error: the test would then compare transformers with itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


@pytest.fixture
def implementation_runs(no_fallback):
    """Fails a test in which no call reached the implementation, and yields the list of calls."""
    with counted_calls() as calls:
        yield calls
    assert calls, f"{IMPLEMENTATION} never ran"


@pytest.fixture(scope="session")
def families_table():
    """A dict from Family to Row, which the tests fill and the end of the session writes."""
    rows = {}
    yield rows
    path = os.environ.get("SWITCHYARD_FAMILIES_TABLE")
    if path:
        Path(path).write_text(markdown(rows), encoding="utf-8")
