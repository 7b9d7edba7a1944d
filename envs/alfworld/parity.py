"""Plays games on two engines side by side and counts the answers that differ (expected: 0).

python -m envs.alfworld.parity --data=DIR                      # every game of every split, ours against TextWorld's
python -m envs.alfworld.parity --data=DIR --games=60 --engine=pip

Each game is played twice: a random walk that prefers interactions and names impossible things now and then, and the
game's own walkthrough. Compared are the text, the admissible commands and their order, won, done and reward.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from envs.alfworld import engine
from envs.alfworld.games import SPLIT_DIRS, find_game_files
from envs.base import Obs

INTERACTS = 0.7  # chance that a random walk does something else than go elsewhere, where it can
INVALID = 0.1  # chance that it says something that is not admissible
# What no game understands, and what only looks like a command.
ODD_COMMANDS = (
    "",
    "   ",
    "xyzzy",
    "go to",
    "LOOK",
    " look ",
    "go to  shelf 1",
    "take",
    "打开 冰箱",
    "go to shelf 1" * 400,
)

Player = Callable[[int, tuple[str, ...]], str]  # (number of the step, admissible commands) -> command


class Difference(NamedTuple):
    """The first answer of a walk that is not the same."""

    source: Any
    commands: list[str]  # that led to it
    first: Obs
    second: Obs

    def __str__(self) -> str:
        fields = [n for n in Obs._fields if getattr(self.first, n) != getattr(self.second, n)]
        lines = [f"{self.source}: after {self.commands} the answers differ in {', '.join(fields)}"]
        for name in fields:
            one, other = getattr(self.first, name), getattr(self.second, name)
            if name == "admissible":
                one, other = sorted(set(one) - set(other)), sorted(set(other) - set(one))
            lines.append(f"    {one!r}\n    {other!r}")
        return "\n".join(lines)


def random_player(seed: int) -> Player:
    rng = random.Random(seed)

    def choose(_: int, admissible: tuple[str, ...]) -> str:
        if rng.random() < INVALID:
            return rng.choice([*ODD_COMMANDS, rng.choice(admissible) + " 1", "take apple 9 from shelf 1"])
        interactions = [command for command in admissible if not command.startswith("go to ")]
        return rng.choice(interactions if rng.random() < INTERACTS else admissible)

    return choose


def follow(plan: list[str]) -> Player:
    return lambda step, _: plan[step]


def walk(source: Any, first: Any, second: Any, player: Player, steps: int) -> tuple[int, Difference | None]:
    """(answers compared, the first difference). Both games are reset; the first one's commands are offered."""
    commands: list[str] = []
    one, other = first.reset(), second.reset()
    for step in range(steps):
        if one != other:
            break
        commands.append(player(step, one.admissible))
        one, other = first.step(commands[-1]), second.step(commands[-1])
    return len(commands) + 1, Difference(source, commands, one, other) if one != other else None


def compare_game(source: Any, engines: tuple[str, str], steps: int, seed: int) -> tuple[int, list[Difference]]:
    """A random walk and the walkthrough of one game: (answers compared, differences)."""
    first, second = (engine.make(source, name) for name in engines)
    plan = first.walkthrough or []
    walks = [(random_player(seed), steps), (follow(plan), len(plan))]
    results = [walk(source, first, second, player, count) for player, count in walks]
    return sum(count for count, _ in results), [found for _, found in results if found]


def compare_all(sources: Iterable[Any], engines: tuple[str, str], steps: int) -> Iterator[tuple[int, list[Difference]]]:
    for seed, source in enumerate(sources):
        yield compare_game(source, engines, steps, seed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None, help="directory of the games; default: $ALFWORLD_DATA")
    parser.add_argument(
        "--splits", default="train,seen,unseen", help="separated by commas; one that is absent is named"
    )
    parser.add_argument("--games", type=int, default=0, help="spread evenly over the splits; 0 = all")
    parser.add_argument("--shard", default="0/1", help="i/n: only every n-th game, from the i-th on")
    parser.add_argument("--steps", type=int, default=40, help="of each random walk")
    parser.add_argument(
        "--engine", choices=("textworld", "pip"), default="textworld", help="what ours is compared with"
    )
    parser.add_argument("--of", choices=("native", "textworld"), default="native", help="what is compared")
    options = parser.parse_args(argv)
    files = _files(options)
    start, answers, differences, games = time.perf_counter(), 0, 0, 0
    for count, found in compare_all(files, (options.of, options.engine), options.steps):
        games, answers, differences = games + 1, answers + count, differences + len(found)
        for difference in found:
            print(difference, flush=True)
        if games % 100 == 0:
            left = (time.perf_counter() - start) / games * (len(files) - games)
            print(f"{games} of {len(files)} games, about {left / 60:.0f} minutes left", file=sys.stderr, flush=True)
    print(f"{options.of} against {options.engine}: {games} games, {answers} answers, {differences} differences")
    return 1 if differences else 0


def _files(options: argparse.Namespace) -> list[Path]:
    files: list[Path] = []
    for split in options.splits.split(","):
        try:
            found = find_game_files(options.data, split)
        except FileNotFoundError as error:
            if split not in SPLIT_DIRS or options.splits != "train,seen,unseen":
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        print(f"{split}: {len(found)} games", file=sys.stderr)
        files += found
    if options.games:
        files = list(islice(files, 0, None, max(1, len(files) // options.games)))[: options.games]
    index, number = map(int, options.shard.split("/"))
    return files[index::number]


if __name__ == "__main__":
    sys.exit(main())
