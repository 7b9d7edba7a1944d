"""Wires WebShop, Search-QA, Sokoban and EZPoints to the trainer (ALFWorld: launch/environment.py). What a config names
is loaded once.

The splits of evaluation are called as everywhere: "seen" is the dev split, "unseen" the test split.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from envs.base import Task
from envs.ezpoints import deal
from envs.ezpoints import draw as cards
from envs.ezpoints import game as ezpoints
from envs.ezpoints.domain import GOAL as EZPOINTS_GOAL
from envs.ezpoints.domain import EzpointsDomain
from envs.pool import LocalPool
from envs.search import data as questions
from envs.search import generate as encyclopedia
from envs.search.domain import SearchDomain
from envs.search.game import Protocol, SearchPool
from envs.search.http import HttpRetriever
from envs.search.retrieval import Bm25Retriever, Cached, DenseRetriever, load_corpus
from envs.sokoban import draw as tiles
from envs.sokoban import game as sokoban
from envs.sokoban import generate as rooms
from envs.sokoban.domain import GOAL as SOKOBAN_GOAL
from envs.sokoban.domain import SokobanDomain
from envs.sokoban.files import read_rooms
from envs.sokoban.room import read_level
from envs.webshop import catalogue, goals, session
from envs.webshop import generate as products
from envs.webshop.domain import WebshopDomain
from seed_jax import encoder
from seed_jax.rollout import World

NAMES = ("webshop", "search", "sokoban", "ezpoints")
GENERATED, OFFICIAL = "generated", "official"
_SPLITS = {"train": "train", "seen": "dev", "unseen": "test"}
SOKOBAN_PANEL = 128  # rooms of a panel where the config asks for all: there is no end of them


class _Goods(NamedTuple):
    shop: session.Shop
    goals: list[goals.Goal]


def split_tasks(config, split: str, limit: int) -> list[Task]:
    """The first `limit` tasks (0 = all) of "train", "seen" or "unseen". Raises ValueError."""
    if config.env.data == OFFICIAL:
        raise ValueError(f"env.data = 'official': {config.env.name} has no such data; name a directory or 'generated'")
    load = {
        "webshop": _webshop_tasks,
        "search": _search_tasks,
        "sokoban": _sokoban_tasks,
        "ezpoints": _ezpoints_tasks,
    }[config.env.name]
    return load(config, split, limit)[: limit or None]


@contextlib.contextmanager
def open_world(config, task: Task) -> Iterator[World]:
    """task: any of those that will be played"""
    open_one = {
        "webshop": _open_webshop,
        "search": _open_search,
        "sokoban": _open_sokoban,
        "ezpoints": _open_ezpoints,
    }[config.env.name]
    with open_one(config) as world:
        yield world if config.env.name in ("webshop", "search") else _pictures(config, world, task)


# -- WebShop


@functools.lru_cache(maxsize=1)
def _goods(data: str, human: bool) -> _Goods:
    if data == GENERATED:
        files, store = products.make_files(), None
    else:
        files, store = catalogue.read_files(data, human), _index_file(data)
    records, skipped = catalogue.derive(files)
    if files.nouns is None:
        raise catalogue.CatalogueError(
            f"{data} holds no {catalogue.NOUNS}*.json, the nouns of product names, which the reward needs: "
            f"python -m envs.webshop.prepare --data={data}"
        )
    if skipped.count:
        print(f"{skipped.count} products are malformed and left out: {'; '.join(skipped.reasons)}", file=sys.stderr)
    return _Goods(session.Shop(records, store), goals.make_goals(records, files, human))


def _index_file(data: str) -> str | None:
    """Where the search index of a folder is kept; None if nothing can be written there."""
    folder = Path(data).expanduser()
    return str(folder / "index.npz") if os.access(folder, os.W_OK) else None


def _webshop_tasks(config, split: str, limit: int) -> list[Task]:
    split = _SPLITS[split]
    chosen = goals.split(_goods(config.env.data, config.env.goals == "human").goals, split)
    return [
        Task(f"{split}/{goal.id}", goal.category, goal.instruction_text, session.goal_source(goal)) for goal in chosen
    ]


@contextlib.contextmanager
def _open_webshop(config) -> Iterator[World]:
    env = config.env
    if env.observation not in session.FORMS:
        raise ValueError(f"env.observation = {env.observation!r}: WebShop has the forms {', '.join(session.FORMS)}")
    shop = _goods(env.data, env.goals == "human").shop
    pool = LocalPool(functools.partial(session.make, shop=shop, form=env.observation, compat=env.compat))
    try:
        yield World(WebshopDomain(env.prompt, config.rollout.require_think), pool, env.max_steps, env.history)
    finally:
        pool.close()


# -- Search-QA


@functools.lru_cache(maxsize=1)
def _encyclopedia() -> encyclopedia.Encyclopedia:
    return encyclopedia.make()


def _search_tasks(config, split: str, limit: int) -> list[Task]:
    split = _SPLITS[split]
    if config.env.data == GENERATED:
        return questions.tasks_of(_encyclopedia().questions[split], split)
    found, bad = questions.load_questions(config.env.data, split)
    if bad:
        print(f"{bad} rows of the {split} split have no question or no golds and are left out", file=sys.stderr)
    return questions.tasks_of(found, split)


@contextlib.contextmanager
def _open_search(config) -> Iterator[World]:
    env = config.env
    rules = Protocol(env.max_steps, env.topk, env.information, env.passage_chars, env.block_chars)
    pool = SearchPool(Cached(_retriever(env)), rules)
    try:
        yield World(SearchDomain(env.prompt), pool, env.max_steps, env.history)
    finally:
        pool.close()


def _retriever(env) -> Any:
    if env.retriever == "http":
        return HttpRetriever([url.strip() for url in env.retriever_url.split(",") if url.strip()])
    return _embedded(env.data, env.retriever, env.retriever_url)


@functools.lru_cache(maxsize=1)
def _embedded(data: str, method: str, model: str) -> Any:
    if data == GENERATED:
        passages, name, store = _encyclopedia().passages, f"generated-{encyclopedia.VERSION}", None
    else:
        passages = load_corpus(Path(data).expanduser() / "corpus.jsonl")
        name, store = Path(data).name, _index_file(data)
    if method == "bm25":
        return Bm25Retriever(passages, name, store)
    if not model:
        raise ValueError("env.retriever = 'dense' needs the directory of an encoder in env.retriever_url")
    return DenseRetriever(passages, encoder.load(model), name)


# -- Sokoban and EZPoints: "seen" and "unseen" are two panels of rooms, or deals, that do not occur in training


def image_size(env, task: Task | None = None) -> tuple[int, int] | None:
    """Height and width of the pictures of a task, which are those of all; None if there are none. Without a task, of
    generated ones."""
    if env.observation != "image":
        return None
    if env.name == "ezpoints":
        return cards.SIZE_PX, cards.SIZE_PX
    room = env if task is None else read_level(task.source["level"])
    return room.rows * env.tile_px, room.columns * env.tile_px


def _pictures(config, world: World, task: Task) -> World:
    """The world with what is known of its pictures."""
    return world._replace(image_size=image_size(config.env, task), min_pixels=config.env.min_pixels)


@functools.lru_cache(maxsize=4)
def _rooms(split: str, count: int, rules: rooms.Rules) -> list[rooms.Level]:
    return rooms.first_levels(split, count, rules)


def _sokoban_tasks(config, split: str, limit: int) -> list[Task]:
    """Panels report success by the length of the solution; training keeps the mix of the generator."""
    env = config.env
    if env.data == GENERATED:
        rules = rooms.Rules(
            env.rows, env.columns, env.boxes, env.search_depth, env.min_moves, env.max_moves or env.max_steps
        )
        found = [
            (f"{level.seed:010d}", level.room, level.moves) for level in _rooms(split, limit or SOKOBAN_PANEL, rules)
        ]
    else:
        found = read_rooms(Path(env.data).expanduser(), split)
    tasks = []
    for name, room, moves in found:
        family = f"boxes_{len(room.boxes)}"
        if split != "train" and moves is not None:
            family += "_near" if moves < 4 else "_middle" if moves < 7 else "_far"
        tasks.append(Task(f"{split}/{name}", family, SOKOBAN_GOAL, {"level": room.level()}))
    return tasks


@contextlib.contextmanager
def _open_sokoban(config) -> Iterator[World]:
    env = config.env
    domain = SokobanDomain(env.prompt, env.observation, config.rollout.require_think, env.compat)
    tile_px = env.tile_px if env.observation == "image" else 0
    if tile_px:
        tiles.tiles(tile_px)  # raises if they are too small
    form = "digits" if env.prompt == "compact" else "table"
    pool = LocalPool(functools.partial(sokoban.make, max_steps=env.max_steps, form=form, tile_px=tile_px))
    try:
        yield World(domain, pool, env.max_steps, env.history)
    finally:
        pool.close()


def _ezpoints_tasks(config, split: str, limit: int) -> list[Task]:
    """Training deals come as often as the game deals them; a panel has every deal once, and reports by operator."""
    if config.env.data != GENERATED:
        raise ValueError(f"env.data = {config.env.data!r}: EZPoints deals its cards itself; set it to 'generated'")
    if split == "train":
        found = [(f"{seed:05d}", dealt) for seed, dealt in deal.draws(split, limit or 2**14)]
    else:
        found = [(f"{number:03d}", dealt) for number, dealt in enumerate(deal.panel(split))]
    kinds = {"+": "add", "*": "multiply"}
    return [
        Task(
            f"{split}/{number}",
            "ezpoints" if split == "train" else f"ezpoints_{kinds[deal.operator(dealt)]}",
            EZPOINTS_GOAL,
            {"cards": [list(card) for card in dealt]},
        )
        for number, dealt in found
    ]


@contextlib.contextmanager
def _open_ezpoints(config) -> Iterator[World]:
    env = config.env
    domain = EzpointsDomain(env.prompt, env.observation, env.compat)
    sees = env.observation == "image"
    if sees:
        cards.picture(deal.deal(0), (), env.font)  # raises if Pillow is missing
    pool = LocalPool(functools.partial(ezpoints.make, pictures=sees, font=env.font))
    try:
        yield World(domain, pool, env.max_steps, env.history)
    finally:
        pool.close()
