"""Generated ALFWorld games: household rooms in which things lie where people keep them, winnable, without any download.

    python -m envs.alfworld.generate --out=DIR --games=60 --size=mini --split=all

A game is a pure function of (family, seed, size, split). Splits: `train` and `seen` share the room styles and differ in
seeds, `unseen` holds a room style out. Where an object starts follows `household.HABITS`, so that searching well can be
learned.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from envs.alfworld.games import FAMILIES, GAME_FILE, SPLIT_DIRS
from envs.alfworld.household import (
    CLEANABLE,
    COOLABLE,
    FIRST_HABIT_SHARE,
    HABIT_STRENGTH,
    HABITS,
    HEATABLE,
    HELD_OUT_STYLES,
    KNOWN_STYLES,
    LAMP,
    LAMP_STANDS,
    MAX_OF_A_KIND,
    MAX_SAME_OBJECT,
    OPENABLE,
    RECEPTACLES_FOR,
    Style,
)
from envs.alfworld.native import NativeGame
from envs.alfworld.problem import display_names, parse_problem
from envs.base import Task

SIZES = {"tiny": (0, 0), "mini": (3, 4), "small": (5, 6), "large": (18, 30)}  # (extra receptacles, other objects)
FIRST_SEED = {"train": 0, "seen": 1_000_000, "unseen": 2_000_000}
SEEDS_PER_SPLIT = 1_000_000
HABIT_PLACE_PRESENT = 0.85  # chance that a habitual place of the target that is not needed otherwise is in the room
LARGE_ROOM_CROWDING = 2  # a large room may hold this many times the usual number of a type
SECOND_TARGET_APART = 0.5  # pick_two: chance that the second object starts in a receptacle of its own

LIGHT, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"


class Process(NamedTuple):
    """What has to be done to the object on the way."""

    verb: str
    appliance: str
    objects: frozenset[str]
    ability: str
    state: str


PROCESSES = {
    "pick_clean_then_place_in_recep": Process("clean", "SinkBasin", CLEANABLE, "cleanable", "isClean"),
    "pick_heat_then_place_in_recep": Process("heat", "Microwave", HEATABLE, "heatable", "isHot"),
    "pick_cool_then_place_in_recep": Process("cool", "Fridge", COOLABLE, "coolable", "isCool"),
}
SENTENCES = {  # the two templates of each family in the official games
    "pick_and_place_simple": ("put a {object} in {receptacle}", "put some {object} on {receptacle}"),
    LIGHT: ("look at {object} under the {receptacle}", "examine the {object} with the {receptacle}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {object} in {receptacle}",
        "clean some {object} and put it in {receptacle}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {object} in {receptacle}",
        "heat some {object} and put it in {receptacle}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {object} in {receptacle}",
        "cool some {object} and put it in {receptacle}",
    ),
    TWO: ("put two {object} in {receptacle}", "find two {object} and put them in {receptacle}"),
}


class Layout(NamedTuple):
    """A room before it becomes PDDL: receptacles and objects by type name; object i is in receptacle `inside[i]`."""

    family: str
    style: Style
    target: str  # object type of the goal
    destination: str  # receptacle type of the goal; for look_at_obj_in_light the type the lamp stands on
    receptacles: list[str]
    objects: list[str]
    inside: list[int]


def make_game(family: str, seed: int, size: str = "mini", split: str = "train") -> dict[str, Any]:
    """One winnable game as a JSON-able dict for `engine.make`; the same arguments give the same game.

    `object` and `receptacle` are the goal's class names as the texts show them (`receptacle` is `desklamp` for
    look_at_obj_in_light, as in the official games' names); `walkthrough` is checked to win.
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if size not in SIZES:
        raise ValueError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")
    if split not in FIRST_SEED:
        raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(FIRST_SEED)}")
    identifier = f"{split}/{size}/{family}/{seed:07d}"
    rng = random.Random(identifier)
    layout = _make_layout(family, size, split, rng)
    goal_place = LAMP if family == LIGHT else layout.destination
    words = {"object": layout.target.lower(), "receptacle": goal_place.lower()}
    receptacle_ids, object_ids = _identifiers(layout)
    game = {
        "id": identifier,
        "family": family,
        "goal": rng.choice(SENTENCES[family]).format(**words),
        **words,
        "split": split,
        "size": size,
        "seed": seed,
        "style": layout.style.name,
        "directory": f"{family}-{layout.target}-None-{goal_place}-{layout.style.first_scene + seed % 30}",
        "pddl_problem": _pddl(layout, receptacle_ids, object_ids, f"generated_{size}_{seed}"),
        "walkthrough": _plan(layout, receptacle_ids, object_ids),
    }
    _check_winnable(game)
    return game


def make_tasks(split: str, count: int, size: str = "mini") -> list[Task]:
    """`count` tasks, the six families in turn. A longer list starts with the shorter one; splits share no seed."""
    if split not in FIRST_SEED:
        raise ValueError(f"split {split!r} is unknown; choose one of {', '.join(FIRST_SEED)}")
    most = SEEDS_PER_SPLIT * len(FAMILIES)
    if not 1 <= count <= most:
        raise ValueError(f"count must be between 1 and {most}, is {count}")
    tasks = []
    for index in range(count):
        game = make_game(FAMILIES[index % len(FAMILIES)], FIRST_SEED[split] + index // len(FAMILIES), size, split)
        tasks.append(as_task(game))
    return tasks


def as_task(game: dict) -> Task:
    return Task(game["id"], game["family"], game["goal"], game)


# -- the room ----------------------------------------------------------------------------------------------------------


def _make_layout(family: str, size: str, split: str, rng: random.Random) -> Layout:
    extra_receptacles, other_objects = SIZES[size]
    style = rng.choice([s for s in (HELD_OUT_STYLES if split == "unseen" else KNOWN_STYLES) if _suits(s, family)])
    process = PROCESSES.get(family)
    target = rng.choice([kind for kind in style.objects() if process is None or kind in process.objects])
    appliance = [process.appliance] if process else []
    fitting = [place for place in RECEPTACLES_FOR[target] if place in style.receptacles and place not in appliance]
    if family == LIGHT:
        stands = [place for place in LAMP_STANDS if place in style.receptacles]
        destination = rng.choices(stands, [LAMP_STANDS[place] for place in stands])[0]
    else:
        destination = rng.choice(fitting)
    starts = [place for place in fitting if place != destination]
    receptacles = [destination, *appliance, _usual_place(target, starts, rng)]
    inside = [len(receptacles) - 1]
    if family == TWO:
        second = _usual_place(target, starts, rng)
        if rng.random() < SECOND_TARGET_APART and receptacles.count(second) < MAX_OF_A_KIND[second]:
            receptacles.append(second)
        inside.append(len(receptacles) - 1)
    objects = [target] * len(inside)
    if family == LIGHT:
        objects.append(LAMP)
        inside.append(0)
    crowding = LARGE_ROOM_CROWDING if size == "large" else 1
    _add_receptacles(receptacles, extra_receptacles, target, style, crowding, rng)
    layout = Layout(family, style, target, destination, receptacles, objects, inside)
    _add_objects(layout, other_objects, crowding, rng)
    return _shuffle_receptacles(layout, rng)


def _shuffle_receptacles(layout: Layout, rng: random.Random) -> Layout:
    """Numbers in names follow list positions, so the order must not tell which receptacle was chosen first."""
    order = list(range(len(layout.receptacles)))
    rng.shuffle(order)
    position = {old: new for new, old in enumerate(order)}
    return layout._replace(
        receptacles=[layout.receptacles[old] for old in order], inside=[position[index] for index in layout.inside]
    )


def _suits(style: Style, family: str) -> bool:
    if family == LIGHT:
        return any(stand in style.receptacles for stand in LAMP_STANDS)
    return family not in PROCESSES or PROCESSES[family].appliance in style.receptacles


def _usual_place(kind: str, places: list[str], rng: random.Random) -> str:
    """One of `places` (receptacle types, not empty), by the habits of the object type."""
    habitual = [place for place in HABITS[kind] if place in places]
    others = [place for place in places if place not in habitual]
    if habitual and (not others or rng.random() < HABIT_STRENGTH):
        return habitual[0] if len(habitual) == 1 or rng.random() < FIRST_HABIT_SHARE else habitual[1]
    return rng.choice(others)


def _add_receptacles(
    receptacles: list[str], extra: int, target: str, style: Style, crowding: int, rng: random.Random
) -> None:
    """Append `extra` receptacles: mostly the target's habitual places if they are missing; then what the style has."""
    wanted = [place for place in HABITS[target] if place not in receptacles and rng.random() < HABIT_PLACE_PRESENT]
    receptacles += wanted[:extra]
    counts = Counter(receptacles)
    limits = {kind: most * crowding if most > 1 else 1 for kind, most in MAX_OF_A_KIND.items()}
    for _ in range(extra - len(wanted[:extra])):
        free = [kind for kind in style.receptacles if counts[kind] < limits[kind]]
        kind = rng.choices(free, [style.receptacles[kind] for kind in free])[0]
        counts[kind] += 1
        receptacles.append(kind)


def _add_objects(layout: Layout, extra: int, crowding: int, rng: random.Random) -> None:
    """Append `extra` objects in their usual places; none of the target's type where the goal wants it."""
    indices: dict[str, list[int]] = {}  # receptacle type -> its receptacles
    for index, place in enumerate(layout.receptacles):
        indices.setdefault(place, []).append(index)
    places = {kind: [place for place in RECEPTACLES_FOR[kind] if place in indices] for kind in layout.style.objects()}
    places[layout.target] = [place for place in places[layout.target] if place != layout.destination]
    counts = Counter(layout.objects)
    for _ in range(extra):
        kind = rng.choice([kind for kind in places if places[kind] and counts[kind] < MAX_SAME_OBJECT * crowding])
        counts[kind] += 1
        layout.objects.append(kind)
        layout.inside.append(rng.choice(indices[_usual_place(kind, places[kind], rng)]))


# -- PDDL and plan -----------------------------------------------------------------------------------------------------


def _identifiers(layout: Layout) -> tuple[list[str], list[str]]:
    receptacles = [
        f"Sink_bar_{i:02d}_bar_SinkBasin" if kind == "SinkBasin" else f"{kind}_bar_{i:02d}"
        for i, kind in enumerate(layout.receptacles)
    ]
    return receptacles, [f"{kind}_bar_{i:02d}" for i, kind in enumerate(layout.objects)]


def _pddl(layout: Layout, receptacles: list[str], objects: list[str], name: str) -> str:
    places = [f"loc_bar_{i:02d}" for i in range(len(receptacles))]
    facts = ["(atLocation agent1 loc_bar_start)"]
    for receptacle, kind, place in zip(receptacles, layout.receptacles, places, strict=True):
        facts += [f"(receptacleType {receptacle} {kind}Type)", f"(receptacleAtLocation {receptacle} {place})"]
        if kind in OPENABLE:
            facts.append(f"(openable {receptacle})")
    for thing, kind, index in zip(objects, layout.objects, layout.inside, strict=True):
        facts += [f"(objectType {thing} {kind}Type)", f"(inReceptacle {thing} {receptacles[index]})"]
        facts.append(f"(objectAtLocation {thing} {places[index]})")
        if kind == LAMP:
            facts.append(f"(toggleable {thing})")
            continue
        facts.append(f"(pickupable {thing})")
        facts += [f"({process.ability} {thing})" for process in PROCESSES.values() if kind in process.objects]
    object_kinds, receptacle_kinds = sorted(set(layout.objects)), set(layout.receptacles)
    for kind in object_kinds:
        facts += [
            f"(canContain {place}Type {kind}Type)" for place in RECEPTACLES_FOR[kind] if place in receptacle_kinds
        ]
    # the domain's actions name these types, so a problem must declare them whether or not the room has such things
    receptacle_kinds |= {process.appliance for process in PROCESSES.values()}
    declared = [
        ("agent1", "agent"),
        (" ".join(["loc_bar_start", *places]), "location"),
        (" ".join(receptacles), "receptacle"),
        (" ".join(objects), "object"),
        (" ".join(f"{kind}Type" for kind in sorted(receptacle_kinds)), "rtype"),
        (" ".join(f"{kind}Type" for kind in [*object_kinds, "ButterKnife", "Knife"]), "otype"),
    ]
    object_lines = "\n    ".join(f"{names} - {kind}" for names, kind in declared)
    fact_lines = "\n    ".join(facts)
    return (
        f"(define (problem {name})\n  (:domain alfred)\n  (:objects\n    {object_lines})\n"
        f"  (:init\n    {fact_lines})\n  (:goal {_goal(layout)})\n)\n"
    )


def _goal(layout: Layout) -> str:
    """The goal formulas of the official games."""
    target, destination = layout.target, layout.destination
    if layout.family == LIGHT:
        return (
            f"(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {LAMP}Type) "
            "(toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {target}Type) (holds ?a ?o))))"
        )
    if layout.family == TWO:
        return (
            f"(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {target}Type) "
            f"(receptacleType ?r {destination}Type) (inReceptacle ?o1 ?r) "
            "(exists (?o2 - object) (and (not (= ?o1 ?o2)) "
            f"(objectType ?o2 {target}Type) (receptacleType ?r {destination}Type) (inReceptacle ?o2 ?r))))))"
        )
    process = PROCESSES.get(layout.family)
    condition = f"({process.ability} ?o) ({process.state} ?o) " if process else ""
    return (
        f"(exists (?r - receptacle) (exists (?o - object) (and {condition}(objectType ?o {target}Type) "
        f"(receptacleType ?r {destination}Type) (inReceptacle ?o ?r))))"
    )


def _plan(layout: Layout, receptacles: list[str], objects: list[str]) -> list[str]:
    """Commands that win, by a player who knows where everything is."""
    names = display_names({name.lower() for name in receptacles + objects})
    place_names = [names[receptacle.lower()] for receptacle in receptacles]
    closed = {index for index, kind in enumerate(layout.receptacles) if kind in OPENABLE}
    commands: list[str] = []
    here: int | None = None

    def go(index: int, open_it: bool) -> str:
        nonlocal here
        if here != index:
            commands.append(f"go to {place_names[index]}")
            here = index
        if open_it and index in closed:
            commands.append(f"open {place_names[index]}")
            closed.discard(index)
        return place_names[index]

    process = PROCESSES.get(layout.family)
    for number in range(2 if layout.family == TWO else 1):  # the targets are the first objects
        thing = names[objects[number].lower()]
        start = go(layout.inside[number], open_it=True)
        commands.append(f"take {thing} from {start}")
        if layout.family == LIGHT:
            lamp = layout.objects.index(LAMP)
            go(layout.inside[lamp], open_it=False)
            commands.append(f"use {names[objects[lamp].lower()]}")
            continue
        if process:
            appliance = go(layout.receptacles.index(process.appliance), open_it=False)
            commands.append(f"{process.verb} {thing} with {appliance}")
        destination = go(layout.receptacles.index(layout.destination), open_it=True)
        commands.append(f"move {thing} to {destination}")
    return commands


def _check_winnable(game: dict[str, Any]) -> None:
    """Plays the walkthrough: the game must be open at the start and won exactly at its end."""
    player = NativeGame(parse_problem(game["pddl_problem"], game["id"]), game["goal"], task_line="")
    won = [player.reset().won] + [player.step(command).won for command in game["walkthrough"]]
    assert won[-1] and not any(won[:-1]), f"{game['id']}: the walkthrough {game['walkthrough']} gives {won}"


# -- files -------------------------------------------------------------------------------------------------------------


def write_game(game: dict[str, Any], out_dir: str | Path) -> Path:
    """Write a game in the official layout under `out_dir`/train, valid_seen or valid_unseen; needs package alfworld."""
    from envs.alfworld.engine import packaged_texts

    folder = Path(out_dir) / SPLIT_DIRS[game["split"]] / game["directory"] / f"trial_{game['size']}_{game['seed']:07d}"
    content = {
        **packaged_texts(game["goal"]),
        "pddl_problem": game["pddl_problem"],
        "solvable": True,
        "walkthrough": game["walkthrough"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / GAME_FILE
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write generated ALFWorld games in the official layout.")
    parser.add_argument("--out", required=True, help="directory; the split's directory is created in it")
    parser.add_argument("--games", type=int, default=60, help="number of games of a split, the six families in turn")
    parser.add_argument("--size", choices=sorted(SIZES), default="mini")
    parser.add_argument("--split", choices=[*FIRST_SEED, "all"], default="train", help="all: every split")
    options = parser.parse_args(argv)
    for split in FIRST_SEED if options.split == "all" else [options.split]:
        try:
            for task in make_tasks(split, options.games, options.size):
                write_game(task.source, options.out)
        except (ImportError, OSError, ValueError) as error:
            parser.error(str(error))
        print(f"wrote {options.games} games to {Path(options.out) / SPLIT_DIRS[split]}")


if __name__ == "__main__":
    main()
