"""A directory is replaced as a whole or not at all, whenever its writer dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seed_jax.runtime import staging
from seed_jax.runtime.staging import replacing

ROOT = Path(__file__).resolve().parents[2]
# Dies by SIGKILL: while writing, or between the two renames.
WRITER = """
import os, signal, sys
from pathlib import Path
from seed_jax.runtime import staging

out, moment = Path(sys.argv[1]), sys.argv[2]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
rename, calls = Path.rename, []

def counted(self, target):
    calls.append(self)
    if moment == "between the renames" and len(calls) == 2:
        die()
    return rename(self, target)

Path.rename = counted
with staging.replacing(out) as partial:
    (partial / "new").write_text("half")
    if moment == "while writing":
        die()
"""


def write(out: Path, text: str) -> None:
    with replacing(out) as partial:
        (partial / "new").write_text(text)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_new_directory_and_its_parents(tmp_path):
    write(tmp_path / "a" / "b", "one")
    assert (tmp_path / "a" / "b" / "new").read_text() == "one" and names(tmp_path / "a") == ["b"]


def test_replaces_what_was_there(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    write(tmp_path / "out", "one")
    assert names(tmp_path / "out") == ["new"] and names(tmp_path) == ["out"]


def test_error_leaves_the_old_one(tmp_path):
    write(tmp_path / "out", "one")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "out") as partial:
        (partial / "new").write_text("two")
        raise ZeroDivisionError
    assert (tmp_path / "out" / "new").read_text() == "one" and names(tmp_path) == ["out"]


def test_error_in_the_last_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    write(tmp_path / "out", "one")
    rename, calls = Path.rename, []

    def second_fails(self, target):
        calls.append(self)
        if len(calls) == 2:
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "out", "two")
    assert (tmp_path / "out" / "new").read_text() == "one" and names(tmp_path) == ["out"]


@pytest.mark.parametrize("moment", ["while writing", "between the renames"])
def test_killed_writer(tmp_path, moment):
    """Nothing half-made is in the place of `out`, and the next writer clears up, or puts the old directory back."""
    out = tmp_path / "out"
    write(out, "one")
    command = [sys.executable, "-c", WRITER, str(out), moment]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.returncode == -9
    if moment == "while writing":
        assert (out / "new").read_text() == "one"
    else:
        assert not out.exists()
    with pytest.raises(ZeroDivisionError), replacing(out):
        raise ZeroDivisionError
    assert (out / "new").read_text() == "one" and names(tmp_path) == ["out"]
    write(out, "two")
    assert (out / "new").read_text() == "two" and names(tmp_path) == ["out"]


def test_other_writers_and_other_directories_are_left_alone(tmp_path):
    """A living process, another machine, and names that only look similar."""
    node = staging.platform.node()
    kept = [f".out.partial-{node}-1", ".out.partial-elsewhere-999999999", f".out.partial-{node}-x", ".output"]
    for name in [*kept, f".out.partial-{node}-999999999"]:
        (tmp_path / name).mkdir()
    write(tmp_path / "out", "one")
    assert names(tmp_path) == sorted([*kept, "out"])
