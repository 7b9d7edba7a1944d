"""What a purchase is worth, from 0 to 1: type of product, attributes, options and price.

Matching is lenient, and kept so for comparability: `token_set_ratio` is 100 whenever the words of one text contain
those of the other, so `large` satisfies `x-large`, `blue` satisfies `navy blue`; `pack of 2` for `pack of 12` has 95.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

from envs.webshop.catalogue import Product
from envs.webshop.goals import Goal

THRESHOLD = 85  # a higher ratio is a match
# The first of these inside an option stands for it, in this order.
COLORS = tuple(
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream "
    "crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather "
    "indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha "
    "multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal "
    "rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise "
    "violet walnut wheat white wine yellow".split()
)


class Score(NamedTuple):
    """`reward` and what it is made of. r_*: share of the goal's demands that are met (None: it has none of the kind),
    w_*: weight of the kind in the reward."""

    reward: float
    r_type: float
    r_att: float | None
    w_att: float
    r_option: float | None
    w_option: float
    r_price: float
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float


def score(
    product: Product, goal: Goal, selected_options: Mapping[str, str] | Sequence[str], price: float | None = None
) -> Score:
    """The score of buying `product` with `selected_options` (name -> value, or values alone) at `price` (default: the
    product's own)."""
    values = list(selected_options.values() if isinstance(selected_options, Mapping) else selected_options)
    wanted = list(goal.goal_options.items() if isinstance(goal.goal_options, Mapping) else goal.goal_options)
    attributes, options = _attribute_hits(product, goal.attributes), _option_hits(values, wanted)
    affordable = (product.price if price is None else price) <= goal.price_upper
    kind, query_match, category_match, title_score = _type(product, goal)
    total = len(goal.attributes) + len(wanted) + 1
    return Score(
        reward=kind * (attributes + options + affordable) / total,
        r_type=kind,
        r_att=attributes / len(goal.attributes) if goal.attributes else None,
        w_att=len(goal.attributes) / total,
        r_option=options / len(wanted) if wanted else None,
        w_option=len(wanted) / total,
        r_price=float(affordable),
        w_price=1 / total,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def token_set_ratio(one: Any, other: Any) -> int:
    """That of thefuzz: non-ASCII characters dropped, everything but letters and digits made a blank, rounded."""
    return round(fuzz.token_set_ratio(_ascii(one), _ascii(other), processor=default_process))


def _ascii(text: Any) -> str:
    return str(text).encode("ascii", "ignore").decode()


def _attribute_hits(product: Product, attributes: Sequence[str]) -> int:
    texts = (product.name.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(token_set_ratio(own, attribute) > THRESHOLD for own in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in attributes
    )


def _option_hits(values: Sequence[str], wanted: Sequence[Any]) -> int:
    values, wanted = [normalise_color(value) for value in values], [normalise_color(option) for option in wanted]
    return sum(any(token_set_ratio(value, option) > THRESHOLD for value in values) for option in wanted)


def normalise_color(option: Any) -> Any:
    """`navy blue` -> `blue`. Of a (name, value) pair only a value that *is* a color is replaced; that is how the
    published engine comes out."""
    return next((color for color in COLORS if color in option), option)


def _type(product: Product, goal: Goal) -> tuple[float, bool, bool, float]:
    """(r_type, query match, category match, title score). A title without a common noun overrules everything."""
    query_match = product.query == goal.query
    category_match = len(_path(product.product_category) & _path(goal.product_category)) >= 2
    common = set(product.nouns) & set(goal.nouns)
    title_score = len(common) / len(goal.nouns) if goal.nouns else 0.2
    if title_score == 0:
        kind = 0.0
    elif title_score < 0.1:
        kind = 0.1
    else:
        kind = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    return kind, query_match, category_match, title_score


def _path(category: str) -> set[str]:
    return {part.strip() for part in category.split("›")}
