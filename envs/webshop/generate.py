"""A catalogue from a seed, in the form of the real files, with everything in it that those hold: needs no download.

All words are our own. The nouns of each name are known from how it is made, so no tagger is needed. Products of a type
differ in few words, options or the price, so that a purchase can be wrong in every single term of the score.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from envs.webshop.catalogue import SEED, Files

VERSION = 1  # of what a seed gives
PRODUCTS = 450
_ODD = 30  # every so many products one of each unusual form


class Kind(NamedTuple):
    """A type of product. noun: its words, all nouns; extra: a noun phrase for the name; axes: option name -> values."""

    category: str
    path: str
    noun: str
    extras: tuple[str, ...]
    attributes: tuple[str, ...]
    axes: dict[str, tuple[str, ...]]


_COLORS = ("navy blue", "off white", "blue", "white", "forest green", "wine red", "black", "a/b mix")
_SIZES = ("small", "medium", "large", "x-large", "xx-large")
_CLOTHES = ("machine washable", "quick drying", "slim fit", "long sleeve", "tumble dry", "polyester cotton")
_CARE = ("essential oils", "cruelty free", "alcohol free", "dry skin", "fragrance free", "natural ingredients")
_FOOD = ("gluten free", "low sugar", "non gmo", "plant based", "kosher certified", "artificial flavors")
_TECH = ("fast charging", "easy install", "heavy duty", "water resistant", "high speed", "wireless bluetooth")
_OUTDOOR = ("weather proof", "easy clean", "stainless steel", "space saving", "solar powered", "easy assemble")

_CLOTHING_AXES = {"color": _COLORS, "size": _SIZES, "style": ("features", "plain", "striped")}
_CARE_AXES = {"scent": ("lavender", "mint", "citrus peel", "unscented"), "size": ("2 oz", "4 oz", "6/8 oz")}
_FOOD_AXES = {
    "flavor": ("dark cherry", "lemon", "ginger", "sea salt"),
    "size": ("pack of 2", "pack of 6", "pack of 12"),
}
_TECH_AXES = {"color": _COLORS, "length": ("3 feet", "6 feet", "10 feet"), "plug": ("type a", "type c", "type a/c")}
_OUTDOOR_AXES = {"color": _COLORS, "size": ("12 inch", "18 inch", "24 inch"), "finish": ("matte", "glossy", "brushed")}

KINDS = (
    Kind("fashion", "Clothing › Women › Coats", "rain coat", ("hood", "pockets"), _CLOTHES, _CLOTHING_AXES),
    Kind("fashion", "Clothing › Men › Shirts", "work shirt", ("buttons", "collar"), _CLOTHES, _CLOTHING_AXES),
    Kind("fashion", "Shoes › Women › Sandals", "beach sandals", ("straps", "soles"), _CLOTHES, _CLOTHING_AXES),
    Kind("beauty", "Beauty › Skin Care › Creams", "face cream", ("aloe", "jojoba"), _CARE, _CARE_AXES),
    Kind("beauty", "Beauty › Hair Care › Shampoos", "hair shampoo", ("honey", "argan"), _CARE, _CARE_AXES),
    Kind("beauty", "Beauty › Tools › Brushes", "makeup brush", ("case", "bristles"), _CARE, _CARE_AXES),
    Kind("grocery", "Grocery › Snacks › Bars", "oat bars", ("raisins", "almonds"), _FOOD, _FOOD_AXES),
    Kind("grocery", "Grocery › Beverages › Tea", "herb tea", ("petals", "roots"), _FOOD, _FOOD_AXES),
    Kind("grocery", "Grocery › Pantry › Sauces", "chili sauce", ("garlic", "vinegar"), _FOOD, _FOOD_AXES),
    Kind("electronics", "Electronics › Cables › Chargers", "charger cable", ("clip", "sleeve"), _TECH, _TECH_AXES),
    Kind("electronics", "Electronics › Audio › Speakers", "desk speaker", ("handle", "battery"), _TECH, _TECH_AXES),
    Kind("electronics", "Electronics › Cameras › Tripods", "camera tripod", ("remote", "bag"), _TECH, _TECH_AXES),
    Kind("garden", "Home › Garden › Lamps", "path lamp", ("stake", "sensor"), _OUTDOOR, _OUTDOOR_AXES),
    Kind("garden", "Home › Furniture › Shelves", "wall shelf", ("hooks", "brackets"), _OUTDOOR, _OUTDOOR_AXES),
    Kind("garden", "Home › Kitchen › Racks", "dish rack", ("tray", "feet"), _OUTDOOR, _OUTDOOR_AXES),
)
_BRANDS = ("Velmora", "Kestrix", "Ondari", "Brünwald", "Talovic", "Señara", "Quillon", "Hartwyn", "Zephyra", "Mosko")
_WORDS = ("sturdy", "elegant", "compact", "classic", "modern")
_OPENINGS = ("i am looking for a", "i want to buy a", "find me a", "i need a")


def make_files(seed: int = SEED, count: int = PRODUCTS) -> Files:
    """The content of the four files; `count` products that a loader keeps, and a few that it must drop."""
    rng = random.Random(seed)
    products, instructions, human, nouns = [], {}, {}, {}
    for number in range(count):
        kind, asin = KINDS[number % len(KINDS)], _asin(rng, number)
        raw, stored, words = _make(rng, number, kind, asin)
        products.append(raw)
        if stored is not None:
            instructions[asin] = stored
        nouns[asin] = words
        if number % 3 == 0:
            human[asin] = _human(rng, number, kind, raw, stored)
    products[count // 2 : count // 2] = _to_drop(products)
    return Files(products, instructions, human, nouns)


def _asin(rng: random.Random, number: int) -> str:
    return f"B0{number:04d}" + "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(4))


def _make(rng: random.Random, number: int, kind: Kind, asin: str) -> tuple[dict, dict | None, list[str]]:
    """(product, instruction record or None, nouns of the name)."""
    odd = number // len(KINDS) % _ODD  # so that every kind of product has every odd form once in a while
    attributes = rng.sample(kind.attributes, 3)
    name, nouns = _name(rng, kind, attributes[2] if number % 5 == 0 else "")
    bullets: Any = [f"It is {attributes[0]} and made for daily use.", f"Comes with {rng.choice(kind.extras)}."]
    description = f"A {rng.choice(_WORDS)} {kind.noun} for home and travel. It is also {attributes[1]}."
    listed = list(attributes)
    if number % 4 == 1:
        listed = [attributes[2]]  # the others are found in the texts alone
    if number % 7 == 2:
        bullets = bullets[0]
    if odd == 3:
        bullets, listed = [], list(attributes)
    if odd == 4:
        bullets, listed = "", list(attributes)
    wanted = attributes[: rng.randint(1, 2)] if number % 5 else [attributes[2]]
    if "essential oils" in listed and number % 2:
        wanted = ["essential oil"]  # the same but for a letter
    raw = {
        "asin": asin,
        "name": name,
        "category": kind.category,
        "query": f"{rng.choice(_WORDS)} {kind.noun}" if number % 6 == 0 else kind.noun,
        "product_category": kind.path,
        "full_description": description,
        "small_description": bullets,
        "pricing": _price(rng, number),
        "customization_options": _options(rng, number, kind),
        "images": [f"{asin}.jpg"],
    }
    if odd == 5:
        return raw, None, nouns  # no record at all
    if odd == 6:
        return raw, {"attributes": [], "instruction": None, "instruction_attributes": []}, nouns
    text = f"{rng.choice(_OPENINGS)} {', '.join(wanted)} {kind.noun}"
    return raw, {"attributes": listed, "instruction": text, "instruction_attributes": wanted}, nouns


def _name(rng: random.Random, kind: Kind, attribute: str) -> tuple[str, list[str]]:
    """A name and its nouns: brand (a proper noun), the words of the type, an extra."""
    brand, extra = rng.choice(_BRANDS), rng.choice(kind.extras)
    number = rng.randint(2, 99)
    words = f"{brand} {attribute + ' ' if attribute else ''}{rng.choice(_WORDS)} {kind.noun.title()}"
    name = f"{words} with {extra} for travel ({number})"
    return name, [brand.lower(), *kind.noun.split(), extra, "travel"]


def _price(rng: random.Random, number: int) -> str:
    low = rng.randint(400, 12000) / 100
    form = number // len(KINDS) % 8
    if form == 1:
        return f"${low:.2f}${low + rng.randint(100, 3000) / 100:.2f}"
    if form == 2:
        return ""
    if form == 3:
        return f"${rng.randint(991, 1900):,}.00"  # above every bound
    return f"${low:.2f}"


def _options(rng: random.Random, number: int, kind: Kind) -> dict[str, Any]:
    """0 to 3 axes of 2 to 5 values; now and then an axis without a list, or one value on two axes."""
    form = number // len(KINDS) % 12
    if form == 4:
        return {}
    if form == 5:
        return {"color": None, "size": _values(["one size", "two sizes"])}
    if form == 6:
        return {"Fit": _values(["regular"]), "Length": _values(["regular"]), "Color": _values(list(_COLORS[:4]))}
    names = list(kind.axes)
    chosen = sorted(rng.sample(names, rng.randint(1, len(names))), key=names.index)
    sizes = {name: rng.randint(2, min(5, len(kind.axes[name]))) for name in chosen}
    return {name.title(): _values(rng.sample(kind.axes[name], sizes[name])) for name in chosen}


def _values(values: list[str]) -> list[dict[str, str]]:
    return [{"value": f" {value.title()} ", "image": ""} for value in values]


def _human(rng: random.Random, number: int, kind: Kind, raw: dict, stored: dict | None) -> list[dict[str, Any]]:
    """Instructions as people write them: with options, without, and one that says no attribute (which is skipped)."""
    listed = (stored or {}).get("attributes") or []
    options = [
        rng.choice(entries)["value"].strip().lower() for entries in raw["customization_options"].values() if entries
    ]
    options = [option.replace("/", " | ") for option in options]
    told = f" in {' and '.join(options)}" if options else ""
    texts = [(f"could you get me a {kind.noun}{told} please.", listed[:1], options)]
    texts.append((f"any {kind.noun} that is {' and '.join(listed[:2])}..", listed[:2], []))
    if number % 6 == 0:
        texts.append((f"a {kind.noun}", [], options))
    return [
        {"instruction": text, "instruction_attributes": attributes, "instruction_options": wanted}
        for text, attributes, wanted in texts
    ]


def _to_drop(products: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rules of the loader leave out: a second product of one asin, a long asin, "nan"."""
    first = products[0]
    return [{**first, "name": "a second one"}, {**first, "asin": f"{first['asin']}X"}, {**first, "asin": "nan"}]
