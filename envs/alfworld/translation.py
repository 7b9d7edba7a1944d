"""What the planner makes of a PDDL game, kept on disk: translating takes half a second, reading it back milliseconds.

A file of the cache holds one game as compressed JSON, about 50 KB. Its name is the hash of domain, problem and
translator, so nothing in it can go out of date.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

CACHE_VARIABLE = "SEED_JAX_CACHE"  # environment variable: the directory for what can be computed again
FORMAT = 1  # of the cache's files; part of their names

_log = logging.getLogger(__name__)


class Translation(NamedTuple):
    """A translated game: all that TextWorld's state needs to know of it."""

    sas: str  # the planning task in the planner's own format
    actions: dict[str, list[tuple[str, str]]]  # action -> (name, type) of its parameters
    types: list[tuple[str, list[str]]]  # (type, its supertypes)
    objects: dict[str, str]  # object -> type
    facts: list[tuple[str, list[str]]]  # (predicate, objects) that hold at the start
    changing: frozenset[str]  # predicates that an action or an axiom may change


def cache_directory() -> Path:
    base = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "seed_jax"
    return Path(base) / "textworld"


def translated(domain: str, problem: str, directory: Path | None = None) -> Translation:
    """From the cache, or made now and put there. A damaged file is made anew, a directory that cannot be written is
    done without."""
    folder = cache_directory() if directory is None else directory
    path = folder / f"{_key(domain, problem)}.json.z"
    try:
        return _unpack(zlib.decompress(path.read_bytes()))
    except FileNotFoundError:
        pass
    except (OSError, zlib.error, ValueError, KeyError, TypeError) as error:
        _log.warning("the cached translation %s cannot be used (%s); it is made anew", path, error)
    result = translate(domain, problem)
    try:
        _store(path, zlib.compress(json.dumps(_packed(result)).encode(), 3))
    except OSError as error:
        _log.warning("a translation cannot be kept in %s (%s); set %s", folder, error, CACHE_VARIABLE)
    return result


def _key(domain: str, problem: str) -> str:
    parts = (f"{FORMAT} {_translator_version()}", domain, problem)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _translator_version() -> str:
    return importlib.metadata.version("fast-downward-textworld")


def translate(domain: str, problem: str) -> Translation:
    """The planner's translation without pruning, as TextWorld plays it. Raises what the planner raises."""
    import fast_downward
    from fast_downward.translate.pddl.conditions import Atom
    from fast_downward.translate.pddl.f_expression import Assign

    arguments = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(domain, problem)
    finally:
        sys.argv = arguments  # the planner puts its own there
    facts = []
    for item in task.init:
        if isinstance(item, Atom) and item.predicate != "=":
            facts.append((item.predicate, list(item.args)))
        elif (
            isinstance(item, Assign) and item.fluent.symbol != "total-cost" and not str(item.expression.value).isdigit()
        ):
            facts.append((str(item.expression.value), list(item.fluent.args)))  # costs and distances are left out
    changing = {effect.literal.predicate for action in task.actions for effect in action.effects}
    return Translation(
        sas=sas,
        actions={a.name: [(p.name.strip("?"), p.type_name) for p in a.parameters] for a in task.actions},
        types=[(t.name, list(t.supertype_names)) for t in task.types],
        objects={o.name: o.type_name for o in task.objects},
        facts=facts,
        changing=frozenset(changing | {axiom.name for axiom in task.axioms}),
    )


def _packed(translation: Translation) -> dict[str, Any]:
    return {**translation._asdict(), "changing": sorted(translation.changing)}


def _unpack(content: bytes) -> Translation:
    data = json.loads(content)
    return Translation(**{**data, "changing": frozenset(data["changing"])})


def _store(path: Path, content: bytes) -> None:
    """Whole or not at all: several workers may translate the same game at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
