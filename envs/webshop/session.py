"""One WebShop episode: a state machine over the pages of a shop. The shop is loaded once and shared by all sessions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import Obs
from envs.search.bm25 import Index, content_hash
from envs.webshop.actions import SEARCH, Offered, arguments
from envs.webshop.catalogue import Product, indexed_text
from envs.webshop.goals import Goal
from envs.webshop.pages import FORMS, SUBPAGES, View, clickables, render, target
from envs.webshop.reward import Score, score

MAX_RESULTS = 50
MAX_QUERY = 512  # characters; the rest is ignored
WON_REWARD = 10.0


class Shop:
    """The products of a catalogue with their index: read-only, for any number of sessions."""

    def __init__(self, products: Sequence[Product], store: str | None = None):
        """store: file that keeps the index between processes; built again when the catalogue has changed."""
        self.products = {product.asin: product for product in products}
        self._order = list(products)
        texts = [indexed_text(product) for product in products]
        self.version = content_hash(texts)
        self.index = Index.load(store, self.version) if store else None
        if self.index is None:
            self.index = Index.build(texts)
            if store:
                self.index.save(store, self.version)

    def find(self, query: str, seed: str = "") -> tuple[Product, ...]:
        """At most 50 products, best first. A first word `<r>` gives random ones (drawn by `seed`), `<a>`, `<c>` and
        `<q>` all with the attribute, category or query that follows."""
        kind, _, rest = query.partition(" ")
        rest = rest.strip()
        if kind == "<r>":
            chosen = random.Random(seed).sample(self._order, min(MAX_RESULTS, len(self._order)))
            return tuple(chosen)
        if kind == "<a>":
            return tuple(p for p in self._order if rest in (attribute.lower() for attribute in p.attributes))
        if kind == "<c>":
            return tuple(p for p in self._order if p.category.lower() == rest.split(" ")[0])
        if kind == "<q>":
            return tuple(p for p in self._order if p.query == rest)
        return tuple(self._order[number] for number, _ in self.index.top(query, MAX_RESULTS))


class Session:
    """A game (envs/base.py) of one goal. After a step, `no_op` says whether the command had no effect at all."""

    def __init__(
        self,
        shop: Shop,
        goal: Goal,
        form: str = "text",
        *,
        compat: bool = False,
        show_attributes: bool = False,
        strict: bool = False,
    ):
        """form, compat: see pages.render. strict: a step after the end is an error, and otherwise ignored."""
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; choose one of {', '.join(FORMS)}")
        self.shop, self.goal = shop, goal
        self.form, self.compat, self.strict, self.show_attributes = form, compat, strict, show_attributes
        self.reset()

    def reset(self) -> Obs:
        self.page, self.number = "search", 1
        self.found: tuple[Product, ...] = ()
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.seen: set[str] = set()
        self.score: Score | None = None  # of the purchase
        self.no_op = False
        return self._observe()

    @property
    def done(self) -> bool:
        return self.page == "done"

    @property
    def task_score(self) -> float:
        """The score of the purchase, 0 without one."""
        return self.score.reward if self.score else 0.0

    def step(self, command: str) -> Obs:
        if self.done:
            if self.strict:
                raise ValueError("the episode is over: the purchase is made; reset() starts it again")
            return self._observe()
        called = arguments(command)
        self.no_op = not (called and self._act(*called))
        return self._observe(bought=self.done)

    def _act(self, name: str, argument: str) -> bool:
        """Whether it had an effect."""
        if name == "search":
            return self._search(argument)
        if name != "click":
            return False
        hit = target(self.view(), argument)
        if hit is None or hit == ("button", "search"):
            return False
        kind, value = hit
        if kind == "link":
            self._open(value)
        elif kind == "option":
            self.options[value] = argument
        else:
            return self._press(value)
        return True

    def _search(self, query: str) -> bool:
        query = " ".join(query[:MAX_QUERY].split())
        if not query:
            return False
        self.found = self.shop.find(query, self.goal.id)
        self.page, self.number = "results", 1
        self._leave_product()
        return True

    def _open(self, asin: str) -> None:
        self.product, self.page = self.shop.products[asin], "item"
        self.seen.add(asin)

    def _leave_product(self) -> None:
        self.product, self.options = None, {}

    def _press(self, button: str) -> bool:
        if button == "back to search":
            self.page, self.number, self.found, self.seen = "search", 1, (), set()
            self._leave_product()
        elif button == "next >":
            self.number += 1
        elif button == "< prev":
            self._previous()
        elif button in SUBPAGES:
            self.page = button
        elif button == "buy now" and self.product is not None:
            self.score = score(self.product, self.goal, self.options)
            self.page = "done"
        else:
            return False
        return True

    def _previous(self) -> None:
        if self.page == "results":
            self.number -= 1
        elif self.page == "item":
            self.page = "results"
            self._leave_product()
        else:
            self.page = "item"

    def view(self) -> View:
        return View(
            page=self.page,
            instruction=self.goal.instruction_text,
            found=self.found,
            number=self.number,
            product=self.product,
            options=self.options,
            seen=frozenset(self.seen),
            score=self.task_score,
            show_attributes=self.show_attributes,
        )

    def actions(self) -> Offered:
        """What can be done now, as the prompt lists it."""
        search = [SEARCH] if self.page == "search" else []
        return Offered([*search, *(f"click[{text}]" for text in clickables(self.view()))])

    def _observe(self, bought: bool = False) -> Obs:
        won = self.done and self.task_score == 1.0
        return Obs(
            render(self.view(), self.form, self.compat),
            self.actions(),
            won=won,
            done=self.done,
            reward=WON_REWARD if won and bought else 0.0,
            measures=(("score", self.task_score),),
        )


def make(source: Mapping[str, Any], shop: Shop, **settings: Any) -> Session:
    """The session of a task's `source` (`goal_source`)."""
    goal = Goal(**source)
    return Session(shop, goal._replace(attributes=tuple(goal.attributes), nouns=tuple(goal.nouns)), **settings)


def goal_source(goal: Goal) -> dict[str, Any]:
    """A goal as a JSON-able dict: what a task carries and what its content hash is of."""
    return goal._asdict()
