"""Official games for tests, where an archive of them is present."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ARCHIVE = "alfworld_train_valid_seen.tar.xz"
EVERY = 62  # one game in so many is unpacked: 60 of them


class Official(NamedTuple):
    root: Path
    counts: Counter  # files of a split in the whole archive
    files: list[Path]  # unpacked


@pytest.fixture(scope="session")
def official(tmp_path_factory) -> Official:
    """About 60 official games, spread over the archive that lies in the directory SEED_JAX_DATA."""
    archive = Path(os.environ.get("SEED_JAX_DATA", "")) / ARCHIVE
    if not os.environ.get("SEED_JAX_DATA") or not archive.is_file():
        pytest.skip(f"SEED_JAX_DATA names no directory with {ARCHIVE}")
    root, counts = tmp_path_factory.mktemp("official"), Counter()
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            if member.name.endswith("game.tw-pddl"):
                counts[member.name.split("/")[-4]] += 1
                if counts.total() % EVERY == 1:
                    tar.extract(member, root, filter="data")
    return Official(root, counts, sorted(root.rglob("game.tw-pddl")))
