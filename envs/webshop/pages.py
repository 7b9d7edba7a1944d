"""What a session shows: the text of each page in two forms, and what can be clicked on it, straight from the state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from envs.webshop.catalogue import Product

SEPARATOR = " [SEP] "
PER_PAGE = 10
FORMS = ("text", "text_rich")
SELECTED = " (selected)"  # after the value of an option; not in the compatible form
SUBPAGES = ("description", "features", "reviews", "attributes")


class View(NamedTuple):
    """The state that a page is made of."""

    page: str  # search, results, item, done, or one of SUBPAGES
    instruction: str
    found: tuple[Product, ...] = ()  # all results
    number: int = 1  # of the page of results
    product: Product | None = None
    options: dict[str, str] | None = None  # selected
    seen: frozenset[str] = frozenset()
    score: float = 0.0
    show_attributes: bool = False

    @property
    def listed(self) -> tuple[Product, ...]:
        return self.found[(self.number - 1) * PER_PAGE : self.number * PER_PAGE]


class Piece(NamedTuple):
    """One visible string. kind: plain, button, link (a product), option."""

    kind: str
    text: str
    on: bool = False  # selected or visited


def clickables(view: View) -> list[str]:
    """In order, lower case, each once: of equal texts the later one counts, in the place of the earlier."""
    return list(_targets(view))


def target(view: View, text: str) -> tuple[str, str] | None:
    """What a click does: ("button", text), ("link", asin) or ("option", name); None if there is no such thing."""
    return _targets(view).get(text)


def _targets(view: View) -> dict[str, tuple[str, str]]:
    targets = {text.lower(): ("button", text.lower()) for text in _buttons(view)}
    if view.page == "results":
        targets |= {product.asin.lower(): ("link", product.asin) for product in view.listed}
    if view.page == "item":
        targets |= {value: ("option", name) for name, values in view.product.options.items() for value in values}
    return targets


def _buttons(view: View) -> list[str]:
    if view.page == "search":
        return ["Search"]
    if view.page == "results":
        return ["Back to Search", *(["< Prev"] if view.number > 1 else []), "Next >"]
    if view.page == "item":
        attributes = ["Attributes"] if view.show_attributes else []
        return ["Back to Search", "< Prev", "Description", "Features", "Reviews", *attributes, "Buy Now"]
    return [] if view.page == "done" else ["Back to Search", "< Prev"]


def render(view: View, form: str = "text", compat: bool = False) -> str:
    """compat: as the published engine has it, where `text` does not show which option is selected."""
    pieces = list(_pieces(view))
    if form == "text":
        marked = (f"{p.text}{SELECTED}" if p.kind == "option" and p.on and not compat else p.text for p in pieces)
        return SEPARATOR.join(text for text in (text.strip() for text in marked) if text)
    chosen = [f"You have clicked {piece.text}." for piece in pieces if piece.kind == "option" and piece.on]
    return "\n".join([*reversed(chosen), *map(_rich, pieces)])


def _rich(piece: Piece) -> str:
    if piece.kind == "plain":
        return piece.text
    state = "clicked button" if piece.on else "button"
    text = f"[{state}] {piece.text} [{state}_]"
    return {"button": "", "link": "\n", "option": "  "}[piece.kind] + text


def _pieces(view: View) -> Iterator[Piece]:
    if view.page == "done":
        yield from (Piece("plain", text) for text in _receipt(view))
        return
    if view.page == "search":
        yield Piece("plain", "WebShop")
    yield Piece("plain", "Instruction:")
    yield Piece("plain", view.instruction)
    buttons = [Piece("button", text) for text in _buttons(view)]
    if view.page == "results":
        yield buttons[0]
        yield Piece("plain", f"Page {view.number} (Total results: {len(view.found)})")
        yield from buttons[1:]
        for product in view.listed:
            yield Piece("link", product.asin, product.asin in view.seen)
            yield Piece("plain", product.name)
            yield Piece("plain", product.price_tag)
    elif view.page == "item":
        yield from buttons[:2]
        for name, values in view.product.options.items():
            yield Piece("plain", name)
            yield from (Piece("option", value, (view.options or {}).get(name) == value) for value in values)
        yield from (Piece("plain", text) for text in (view.product.name, f"Price: {view.product.price_tag}"))
        yield Piece("plain", "Rating: N.A.")
        yield from buttons[2:]
    else:
        yield from buttons
        yield from (Piece("plain", text) for text in _details(view))


def _details(view: View) -> tuple[str, ...]:
    if view.page == "description":
        return (view.product.description,)
    if view.page == "features":
        return view.product.bullets
    return view.product.attributes if view.page == "attributes" else ()  # the review file is never loaded


def _receipt(view: View) -> tuple[str, ...]:
    return (
        "Thank you for shopping with us!",
        "Your code:",
        "None",
        "Purchased",
        "asin",
        view.product.asin,
        "options",
        json.dumps(view.options or {}, ensure_ascii=False),
        "Your score (min 0.0, max 1.0)",
        str(view.score),
    )
