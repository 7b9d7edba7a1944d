"""benchmarks/exactness.py, shortened: a real run is killed twice and ends as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import exactness
from tests import tiny, xla

ROOT = Path(__file__).resolve().parents[2]
CONFIG = f"--config={ROOT / 'tests/runtime/toy_config.py'}"


def environment(home: Path) -> dict[str, str]:
    settings = {"HOME": str(home), "TOY_MODEL": str(home / "model"), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **settings, "XLA_FLAGS": xla.flags(1)}


@pytest.mark.slow
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
    tiny.save_model(tmp_path / "model", steps=60)
    result = exactness.run([CONFIG], tmp_path / "out", 2, 0, environment(tmp_path), ("update", "save"))
    assert [kill["asked"] for kill in result["kills"]] == ["update", "save"]
    assert result["different"] == []
    # The comparison can fail.
    episodes = tmp_path / "out" / "interrupted" / "episodes.jsonl"
    episodes.write_text(episodes.read_text().replace('"reward": 10.0', '"reward": 9.0', 1))
    whole, other = (exactness.outcome(tmp_path / "out" / name) for name in ("uninterrupted", "interrupted"))
    assert [part for part in whole if whole[part] != other[part]] == ["episodes"]


def test_a_run_that_fails_by_itself_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"failed with code 2; see .*log\.txt"):
        exactness.run([CONFIG, "--config.iterations=0"], tmp_path / "out", 1, 0, environment(tmp_path))
