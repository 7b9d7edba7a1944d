"""Replacing a directory as a whole: written beside its target, renamed at the end."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Yields an empty directory beside `out` that takes its place when the block ends without an error.

    An error, or the death of the process, leaves `out` as it was. What a killed process has left beside `out` is
    removed by the next call for the same `out` on the same machine.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(out)
    partial = _beside(out, "partial")
    partial.mkdir()
    try:
        yield partial
        _swap(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beside(out: Path, role: str) -> Path:
    return out.with_name(f".{out.name}.{role}-{platform.node()}-{os.getpid()}")


def _clear_leftovers(out: Path) -> None:
    """Undoes what a dead process of this machine has begun: an `out` aside is put back, everything else removed."""
    for role in ("old", "partial"):
        prefix = f".{out.name}.{role}-{platform.node()}-"
        for path in sorted(out.parent.iterdir()):
            number = path.name.removeprefix(prefix)
            if not path.name.startswith(prefix) or not number.isdigit() or _runs(int(number)):
                continue
            if role == "old" and not out.exists():
                path.rename(out)
            else:
                shutil.rmtree(path)


def _runs(pid: int) -> bool:
    """Whether another process of that number runs. This one has just begun: what bears its number is not its own."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _swap(new: Path, out: Path) -> None:
    """Put `new` in the place of `out`. POSIX cannot rename over a directory with files, so the old one steps aside."""
    if not out.exists():
        new.rename(out)
        return
    aside = _beside(out, "old")
    out.rename(aside)
    try:
        new.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside)
