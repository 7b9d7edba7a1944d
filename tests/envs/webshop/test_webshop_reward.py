"""The reward of a purchase, worked by hand from the rules: every expected value is a fraction that was counted."""

from __future__ import annotations

import pytest

from envs.webshop.catalogue import Product
from envs.webshop.goals import NO_BOUND, Goal
from envs.webshop.reward import COLORS, normalise_color, score, token_set_ratio

COAT = Product(
    asin="B000000001",
    name="Acme Rain Coat",
    category="fashion",
    query="rain coat",
    product_category="Clothing › Women › Coats",
    description="For windy days. It has a long sleeve.",
    bullets=("Quick drying.", "Two pockets"),
    attributes=("machine washable", "essential oils"),
    options={"color": ("navy blue", "red"), "size": ("large", "x-large")},
    price_tag="$25.0",
    price=25.0,
    nouns=("acme", "rain", "coat"),
)
GOAL = Goal(
    asin="B000000002",
    category="fashion",
    query="rain coat",
    name="Brand Rain Coat",
    product_category="Clothing › Women › Coats",
    instruction_text="find a coat",
    attributes=("machine washable",),
    price_upper=30.0,
    goal_options={"color": "navy blue", "size": "large"},
    nouns=("brand", "rain", "coat"),  # two of three are the coat's: title score 2/3
)
BOTH = {"color": "navy blue", "size": "large"}
OTHER_TYPE = {"query": "umbrella", "product_category": "Sports › Women › Rain"}  # one common part of the path
SIX = ("rain", "one", "two", "three", "four", "five")  # 1/6 of them
ELEVEN = (*SIX, "six", "seven", "eight", "nine", "ten")  # 1/11 of them

# what, changes of the goal, selected, changes of the product, reward
CASES = [
    ("all four demands are met", {}, BOTH, {}, 1.0),
    ("no option: attribute and price", {}, {}, {}, 2 / 4),
    ("one option of two", {}, {"size": "large"}, {}, 3 / 4),
    ("another size", {}, {"color": "navy blue", "size": "small"}, {}, 3 / 4),
    ("large for x-large, a part of it", {"goal_options": {"size": "x-large"}}, {"size": "large"}, {}, 1.0),
    # "large x" and "large size" have no more than 10/12 in common: 83
    ("x-large for a pair with large", {"goal_options": {"size": "large"}}, {"size": "x-large"}, {}, 2 / 3),
    ("x-large for large alone", {"goal_options": ["large"]}, {"size": "x-large"}, {}, 1.0),
    ("too expensive", {}, BOTH, {"price": 30.01}, 3 / 4),
    ("as expensive as allowed", {}, BOTH, {"price": 30.0}, 1.0),
    ("attribute in the title", {"attributes": ("acme rain",)}, BOTH, {}, 1.0),
    ("attribute in a bullet", {"attributes": ("quick drying",)}, BOTH, {}, 1.0),
    ("attribute across two bullets", {"attributes": ("drying. two",)}, BOTH, {}, 1.0),
    ("attribute in the description", {"attributes": ("long sleeve",)}, BOTH, {}, 1.0),
    ("a text is searched in lower case only", {"attributes": ("Quick Drying",)}, BOTH, {}, 3 / 4),
    # 2 * 13 of 27 letters: 96
    ("attribute but for a letter", {"attributes": ("essential oil",)}, BOTH, {}, 1.0),
    ("one attribute of two", {"attributes": ("machine washable", "waterproof")}, BOTH, {}, 4 / 5),
    ("type by the title alone", OTHER_TYPE, BOTH, {}, 1.0),
    ("type by nothing", {**OTHER_TYPE, "nouns": SIX}, BOTH, {}, 0.5),
    ("type by the query", {"nouns": SIX, "product_category": "x"}, BOTH, {}, 1.0),
    ("type by two parts of the path", {"nouns": SIX, "query": "x", "product_category": "Coats›Women"}, BOTH, {}, 1.0),
    ("a title with little in common", {"nouns": ELEVEN}, BOTH, {}, 0.1),
    ("a title with nothing in common overrules the query", {"nouns": ("hat",)}, BOTH, {}, 0.0),
    ("a goal without nouns, type by the query", {"nouns": ()}, BOTH, {}, 1.0),
    ("a goal without nouns, type by nothing", {**OTHER_TYPE, "nouns": ()}, {}, {}, 0.5 * 2 / 4),
    ("two blues are one", {"goal_options": ["sky blue"]}, {"color": "navy blue"}, {}, 1.0),
    ("two blues of a pair", {"goal_options": {"color": "sky blue"}}, {"color": "navy blue"}, {}, 1.0),
    ("a pair whose value is a color", {"goal_options": {"color": "blue"}}, {"color": "navy blue"}, {}, 1.0),
    ("red is not blue", {"goal_options": ["sky blue"]}, {"color": "red"}, {}, 2 / 3),
    ("packs of 2 and 12", {"goal_options": ["pack of 12"]}, {"size": "pack of 2"}, {}, 1.0),
    ("a value may sit under another option", {"goal_options": {"size": "large"}}, {"fit": "large"}, {}, 1.0),
    ("nothing but a price", {"goal_options": [], "attributes": ()}, {}, {}, 1.0),
    ("no bound", {"price_upper": NO_BOUND}, BOTH, {"price": 5000.0}, 1.0),
]


@pytest.mark.parametrize(("goal", "selected", "product", "reward"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_worked_by_hand(goal, selected, product, reward):
    assert score(COAT._replace(**product), GOAL._replace(**goal), selected).reward == pytest.approx(reward, abs=1e-12)


def test_sub_scores():
    found = score(COAT, GOAL._replace(attributes=("machine washable", "waterproof")), {"size": "large"}, price=31.0)
    assert found == (1.0 * 2 / 5, 1.0, 1 / 2, 2 / 5, 1 / 2, 2 / 5, 0.0, 1 / 5, True, True, 2 / 3)
    bare = score(COAT, GOAL._replace(attributes=(), goal_options={}), [], 31.0)
    assert bare.r_att is None and bare.r_option is None and (bare.w_price, bare.reward) == (1.0, 0.0)


def test_ratio_of_words():
    assert token_set_ratio("large", "x-large") == token_set_ratio("Blue", "navy  blue!") == 100
    assert token_set_ratio("pack of 2", "pack of 12") == 95
    assert token_set_ratio("essential oils", "essential oil") == 96
    assert token_set_ratio("café", "caf") == 100 and token_set_ratio("", "x") == 0
    assert token_set_ratio("red", ("color", "red")) == 100


def test_colors():
    assert list(COLORS) == sorted(COLORS) and len(set(COLORS)) == len(COLORS)
    assert normalise_color("navy blue") == "blue" and normalise_color("off white") == "white"
    assert normalise_color("large") == "large" and normalise_color(("color", "navy blue")) == ("color", "navy blue")
    assert normalise_color("colored") == "red", "also inside of a word"
