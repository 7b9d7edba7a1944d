"""What to buy: goals from the instructions of a catalogue, in one fixed order, and their splits.

Every process builds the same goals with the same price bounds. (In the public reference each worker draws its own, so
that most validation goals can be trained on.)
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from envs.webshop.catalogue import SEED, CatalogueError, Files, Product

NO_BOUND = 1_000_000.0
SPLITS = {"test": (0, 500), "dev": (500, 1500), "train": (1500, None)}  # positions in the shuffled order
_BOUNDS = range(10, 1000, 10)


class Goal(NamedTuple):
    """One goal. `options`: a list of texts (human goals) or name -> value (synthetic goals)."""

    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: tuple[str, ...]
    price_upper: float
    goal_options: Mapping[str, str] | Sequence[str]
    weight: float = 1.0
    nouns: tuple[str, ...] = ()  # of `name`

    @property
    def id(self) -> str:
        """Names the goal by its content: product, options and text."""
        content = json.dumps([self.asin, self.goal_options, self.instruction_text], sort_keys=True)
        return f"{self.asin}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def make_goals(products: Sequence[Product], files: Files, human: bool) -> list[Goal]:
    """All goals in their fixed order. Raises CatalogueError if human goals are wanted and the file is not there."""
    if human and files.human is None:
        raise CatalogueError(
            "human goals need items_human_ins.json: gdown 14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O -O items_human_ins.json, "
            "or set env.goals='synthetic'"
        )
    rng = random.Random(SEED)
    build = _human_goals if human else _synthetic_goals
    goals, known = [], set()
    for product in products:
        bound = _draw_bound(product.price, rng)
        for number, goal in enumerate(build(product, files)):
            if human and number:
                bound = _draw_bound(product.price, rng)  # of each instruction; synthetic goals of a product share one
            key = (goal.asin, json.dumps(goal.goal_options), goal.instruction_text)
            if key in known:  # an option value that the product lists twice: it could get into two splits
                continue
            known.add(key)
            goals.append(_with_bound(goal, bound))
    if not human:
        goals = _weighted(goals)
    random.Random(SEED).shuffle(goals)
    return goals


def _human_goals(product: Product, files: Files) -> list[Goal]:
    stored = files.human.get(product.asin, []) if files.human else []
    return [
        _goal(
            product,
            entry["instruction"].rstrip("."),
            entry["instruction_attributes"],
            list(entry.get("instruction_options") or []),
        )
        for entry in stored
        if entry.get("instruction_attributes")
    ]


def _synthetic_goals(product: Product, files: Files) -> list[Goal]:
    stored = files.instructions.get(product.asin) or {}
    if not stored.get("instruction"):
        return []
    names = sorted(product.options)
    goals = []
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        wanted = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = stored["instruction"] + (f" with {wanted}" if wanted else "")
        goals.append(_goal(product, text, stored.get("instruction_attributes") or [], options))
    return goals


def _goal(product: Product, text: str, attributes: Sequence[str], options: Any) -> Goal:
    return Goal(
        asin=product.asin,
        category=product.category,
        query=product.query,
        name=product.name,
        product_category=product.product_category,
        instruction_text=text,
        attributes=tuple(attributes),
        price_upper=NO_BOUND,
        goal_options=options,
        nouns=product.nouns,
    )


def _draw_bound(price: float, rng: random.Random) -> float | None:
    """The larger of two draws from the first four multiples of ten above the price; None where there are no two."""
    candidates = [bound for bound in _BOUNDS if bound > price][:4]
    return float(max(rng.sample(candidates, 2))) if len(candidates) >= 2 else None


def _with_bound(goal: Goal, bound: float | None) -> Goal:
    if bound is None:
        return goal
    text = f"{goal.instruction_text}, and price lower than {bound:.2f} dollars"
    return goal._replace(price_upper=bound, instruction_text=text)


def _weighted(goals: Sequence[Goal]) -> list[Goal]:
    """Weight: mean over a goal's attributes of 1 / (goals with that attribute)."""
    carried = Counter(attribute for goal in goals for attribute in goal.attributes)
    return [
        goal._replace(weight=sum(1 / carried[a] for a in goal.attributes) / len(goal.attributes))
        if goal.attributes
        else goal
        for goal in goals
    ]


def split(goals: Sequence[Goal], name: str, at_least: int = 1) -> list[Goal]:
    """The goals of a split. Raises CatalogueError if there are fewer than `at_least`, or if splits share a goal."""
    start, stop = SPLITS[name]
    chosen = list(goals[start:stop])
    if len(chosen) < at_least:
        raise CatalogueError(
            f"the catalogue gives {len(goals)} goals; the {name} split (goals {start} to {stop or 'the last'}) has "
            f"{len(chosen)} of them, but {at_least} are asked for: lower env.train_tasks, rollout.tasks or eval.games, "
            "or use a larger catalogue"
        )
    check_disjoint(goals)
    return chosen


def check_disjoint(goals: Sequence[Goal]) -> None:
    """Raises CatalogueError if a goal of one split is also in another."""
    where: dict[str, str] = {}
    for name, (start, stop) in SPLITS.items():
        for goal in goals[start:stop]:
            if where.setdefault(goal.id, name) != name:
                raise CatalogueError(f"goal {goal.id} is in the splits {where[goal.id]} and {name}")
