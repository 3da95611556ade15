# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests of this folder."""
import os

# OpenMP's threads spin while they wait, by default, and there are more ranks than cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402

from ranks import Workers  # noqa: E402

_shared = {}  # by the number of ranks


def _ranks(size):
    if size not in _shared or not all(p.is_alive() for p in _shared[size].processes):
        if size in _shared:
            _shared.pop(size).kill()
        _shared[size] = Workers(size)
    return _shared[size]


@pytest.fixture
def workers():
    """Four ranks that live as long as the tests do; after a test that kills some there are new
    ones."""
    return _ranks(4)


@pytest.fixture
def three():
    """Three ranks of which a test may kill some."""
    return _ranks(3)


@pytest.fixture(scope="session", autouse=True)
def _end_workers():
    yield
    for ranks in _shared.values():
        ranks.close()
