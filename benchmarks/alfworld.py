"""Speed of the ALFWorld engines, as ratios within one run: ours, TextWorld's with cached translations, and pip's.

python -m benchmarks.alfworld [--data=DIR] [--games=4] [--envs=128]

--data: the official games (default: $ALFWORLD_DATA); without any, large generated ones, which are about as large.
All three engines play the same games with the same commands; "warm" is a game whose translation is on disk, and for
pip's engine, which keeps none, a further reset of a loaded game.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envs.alfworld import engine
from envs.alfworld.games import DATA_VARIABLE, find_game_files
from envs.alfworld.generate import make_tasks, write_game
from envs.alfworld.translation import CACHE_VARIABLE
from envs.base import Task
from envs.pool import make_pool

SPLITS = ("unseen", "seen", "train")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="directory of the official games; default: $ALFWORLD_DATA")
    parser.add_argument("--games", type=int, default=4, help="that all three engines play")
    parser.add_argument("--envs", type=int, default=128, help="games at once on our engine")
    parser.add_argument("--steps", type=int, default=20, help="of each game on the TextWorld engines")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[CACHE_VARIABLE] = scratch  # an empty cache of translations
        files = _game_files(options.data, Path(scratch) / "games", max(options.envs, options.games))
        report = {"games": str(options.data or os.environ.get(DATA_VARIABLE) or "generated (large)")}
        report |= measure_native(files[: options.envs])
        report |= measure_textworld(files[:: max(1, len(files) // options.games)][: options.games], options.steps)
    print(json.dumps(report, indent=2))


def _game_files(data: str | None, scratch: Path, count: int) -> list[Path]:
    """`count` files, spread over a split."""
    if data or os.environ.get(DATA_VARIABLE):
        for split in SPLITS:
            try:
                files = find_game_files(data, split)
            except FileNotFoundError:
                continue
            if len(files) >= count or split == SPLITS[-1]:
                return files[:: max(1, len(files) // count)][:count]
    print("no official games: large generated ones are played", file=sys.stderr)
    return [write_game(task.source, scratch) for task in make_tasks("train", count, "large")]


def measure_native(files: Sequence[Path]) -> dict[str, Any]:
    """Loads and first resets of all games, and steps of random play over all of them at once, through the pool."""
    pool, slots = make_pool("envs.alfworld.engine:make"), list(range(len(files)))
    tasks = [Task(str(file), "", "", str(file)) for file in files]
    pool.open(slots[:1], tasks[:1])
    start = time.perf_counter()
    observations = pool.open(slots, tasks)
    opened = time.perf_counter() - start
    rng, steps, spent = random.Random(0), 0, 0.0
    while steps < 20_000:
        commands = [rng.choice(observation.admissible) for observation in observations]
        start = time.perf_counter()
        observations = pool.step(slots, commands)
        spent += time.perf_counter() - start
        steps += len(slots)
    return {
        "native_envs": len(slots),
        "native_load_and_reset_ms": 1000 * opened / len(slots),
        "native_steps_per_s": steps / spent,
    }


def measure_textworld(files: Sequence[Path], steps: int) -> dict[str, Any]:
    """The three engines on the same games and commands; each time is the median over games."""
    engine.make(make_tasks("train", 1, "tiny")[0].source, "textworld").reset()  # imports, grammar
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], Any], repeats: int = 1) -> Any:
        start = time.perf_counter()
        result = [function() for _ in range(repeats)][-1]
        times.setdefault(name, []).append((time.perf_counter() - start) / repeats)
        return result

    for index, file in enumerate(files):
        commands = _random_commands(file, steps, index)
        pip = timed("pip_load", lambda file=file: engine.make(file, "pip"))
        timed("pip_reset", pip.reset)
        timed("pip_steps", lambda pip=pip, commands=commands: [pip.step(c) for c in commands])
        timed("pip_warm_reset", pip.reset)
        timed("cached_cold_load", lambda file=file: engine.make(file, "textworld").reset())
        timed("cached_warm_load", lambda file=file: engine.make(file, "textworld").reset(), repeats=5)
        cached = engine.make(file, "textworld")
        cached.reset()
        timed("cached_steps", lambda cached=cached, commands=commands: [cached.step(c) for c in commands])
        timed("cached_warm_reset", cached.reset)
        native = engine.make(file, "native")
        timed("native_reset", native.reset, repeats=5)
        timed("native_steps", lambda native=native, commands=commands: [native.step(c) for c in commands])
    median = {name: statistics.median(values) for name, values in times.items()}
    pip_warm = median["pip_warm_reset"]
    return {
        "textworld_games": len(files),
        **{f"{name}_ms": 1000 * value / (steps if name.endswith("_steps") else 1) for name, value in median.items()},
        "cached_steps_ratio": median["pip_steps"] / median["cached_steps"],
        "cached_warm_reset_ratio": pip_warm / median["cached_warm_reset"],
        "cached_warm_load_ratio": (median["pip_load"] + median["pip_reset"]) / median["cached_warm_load"],
        "native_steps_ratio": median["pip_steps"] / median["native_steps"],
    }


def _random_commands(file: Path, steps: int, seed: int) -> list[str]:
    game, rng, commands = engine.make(file), random.Random(seed), []
    observation = game.reset()
    for _ in range(steps):
        commands.append(rng.choice(observation.admissible))
        observation = game.step(commands[-1])
    return commands


if __name__ == "__main__":
    main()
