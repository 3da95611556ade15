"""Ranks for the tests of this folder."""
import os

# OpenMP's threads spin while they wait, by default, and there are more ranks than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402

from ranks import Workers  # noqa: E402

_shared = []


@pytest.fixture
def workers():
    """Four ranks that live as long as the tests do; a test that breaks them gets new ones next."""
    if not _shared:
        _shared.append(Workers())
    yield _shared[0]
    if any(not process.is_alive() for process in _shared[0]._processes):
        _shared.pop().close()


@pytest.fixture(scope="session", autouse=True)
def _end_workers():
    yield
    while _shared:
        _shared.pop().close()
