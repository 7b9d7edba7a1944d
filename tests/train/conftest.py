"""Runs of this folder share a tiny model and the programs that were compiled for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seed_jax import teacher
from seed_jax.train import loop, trajectories
from tests import tiny


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def one_device(compiled_programs):
    """Runs take one of the virtual devices."""
    with tiny.one_device(compiled_programs):
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, compiled_programs) -> Path:
    """Knows the form of a reply and little else."""
    with tiny.one_device(compiled_programs):
        return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny", steps=60)


@pytest.fixture(scope="module")
def planner_skills(one_device):
    """The tiny model cannot write skills."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "analyze", tiny.write_skills)
        patch.setattr(trajectories, "analyze", tiny.write_skills)
        patch.setattr(teacher, "analyze", tiny.write_skills)
        yield
