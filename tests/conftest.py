"""Tests run on eight virtual CPU devices, with programs that are compiled quickly (see xla.py).

What needs the precision of optimized sums, or the same bits from two programs, is marked `optimized` and runs apart:
SEED_JAX_OPTIMIZED=1 pytest -m optimized.
"""

from __future__ import annotations

import gc
import os

import pytest

from tests import xla

OPTIMIZED = os.environ.get("SEED_JAX_OPTIMIZED") == "1"
os.environ["XLA_FLAGS"] = xla.flags(8, quick=not OPTIMIZED)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, whose threads spin while they wait for a core


def pytest_collection_modifyitems(items):
    """What is slow first, so that no worker is left with a long file at the end."""
    slow = {"train", "launch", "test_docs.py"}
    items.sort(key=lambda item: slow.isdisjoint((item.path.parent.name, item.path.name)))
    skip = pytest.mark.skip(reason="needs SEED_JAX_OPTIMIZED=1, which the second half of `make test` sets")
    for item in items:
        if item.get_closest_marker("optimized") and not OPTIMIZED:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _drop_compiled_programs():
    """Every compiled program holds memory maps, of which Linux gives a process 65530: past that it is a crash."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
