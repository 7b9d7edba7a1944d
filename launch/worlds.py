"""Wires WebShop and Search-QA to the trainer (ALFWorld: launch/environment.py). What a config names is loaded once.

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
from envs.pool import LocalPool
from envs.search import data as questions
from envs.search import generate as encyclopedia
from envs.search.domain import SearchDomain
from envs.search.game import Protocol, SearchPool
from envs.search.http import HttpRetriever
from envs.search.retrieval import Bm25Retriever, Cached, DenseRetriever, load_corpus
from envs.webshop import catalogue, goals, session
from envs.webshop import generate as products
from envs.webshop.domain import WebshopDomain
from seed_jax import encoder
from seed_jax.rollout import World

NAMES = ("webshop", "search")
GENERATED, OFFICIAL = "generated", "official"
_SPLITS = {"train": "train", "seen": "dev", "unseen": "test"}


class _Goods(NamedTuple):
    shop: session.Shop
    goals: list[goals.Goal]


def split_tasks(config, split: str, limit: int) -> list[Task]:
    """The first `limit` tasks (0 = all) of "train", "seen" or "unseen". Raises ValueError."""
    if config.env.data == OFFICIAL:
        raise ValueError(f"env.data = 'official': {config.env.name} has no such data; name a directory or 'generated'")
    load = {"webshop": _webshop_tasks, "search": _search_tasks}[config.env.name]
    tasks = load(config, _SPLITS[split])
    return tasks[: limit or None]


@contextlib.contextmanager
def open_world(config) -> Iterator[World]:
    with {"webshop": _open_webshop, "search": _open_search}[config.env.name](config) as world:
        yield world


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


def _webshop_tasks(config, split: str) -> list[Task]:
    chosen = goals.split(_goods(config.env.data, config.env.goals == "human").goals, split)
    return [
        Task(f"{split}/{goal.id}", goal.category, goal.instruction_text, session.goal_source(goal)) for goal in chosen
    ]


@contextlib.contextmanager
def _open_webshop(config) -> Iterator[World]:
    env = config.env
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


def _search_tasks(config, split: str) -> list[Task]:
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
