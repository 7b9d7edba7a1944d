"""Golden values of the torch reference, shared by the tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def golden_cases() -> list[dict[str, np.ndarray]]:
    """The cases of objective.npz, each a dict of arrays. SEED_JAX_GOLDEN names the folder."""
    folder = os.environ.get("SEED_JAX_GOLDEN", "")
    path = Path(folder) / "objective.npz"
    if not folder or not path.is_file():
        pytest.skip("SEED_JAX_GOLDEN does not name a folder with objective.npz")
    with np.load(path, allow_pickle=False) as data:
        names = sorted({key.split("/")[0] for key in data})
        return [{key.split("/")[1]: data[key] for key in data if key.startswith(name + "/")} for name in names]
