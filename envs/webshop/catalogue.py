"""The product files of WebShop -> product records. The same code reads the real files and the generated ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PRODUCTS, INSTRUCTIONS, HUMAN, NOUNS = "items_shuffle", "items_ins_v2", "items_human_ins.json", "nouns"
SIZES = ("_1000", "")  # suffix of the file names: 1,000 products, or all
SEED = 233  # of prices, price bounds and the order of goals
MAX_BAD = 0.01  # share of malformed products
NO_PRICE = 100.0
NO_ATTRIBUTE = "DUMMY_ATTR"
DOWNLOAD_HELP = (
    "Get the files with: pip install gdown; mkdir -p $WEBSHOP_DATA; cd $WEBSHOP_DATA; "
    "gdown 1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib -O items_shuffle_1000.json; "
    "gdown 1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu -O items_ins_v2_1000.json; "
    "gdown 14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O -O items_human_ins.json "
    "(all products: 1A2whVgOO0euk5O13n2iYDM0bQRkkRduB, 1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi), "
    "or set env.data='generated'"
)


class CatalogueError(ValueError):
    """A catalogue cannot be used; the message names the file and the remedy."""


class Product(NamedTuple):
    """One product. `price` is what goals and reward count with, `price_tag` what pages show."""

    asin: str
    name: str
    category: str
    query: str
    product_category: str  # path, joined by ` › `
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]  # name -> values, in file order, lower case
    price_tag: str
    price: float
    nouns: tuple[str, ...] = ()  # of the name: lower-cased tokens tagged NOUN or PROPN, duplicates kept


class Files(NamedTuple):
    """The content of the JSON files, before anything is derived from it."""

    products: list[dict[str, Any]]
    instructions: dict[str, Any]
    human: dict[str, list[dict[str, Any]]] | None = None
    nouns: dict[str, list[str]] | None = None  # asin -> nouns of the name


class Skipped(NamedTuple):
    count: int
    reasons: list[str]  # the first five


def read_files(folder: str | Path, human: bool) -> Files:
    """The files of a folder: those of 1,000 products if they are there, else those of all. Raises CatalogueError."""
    folder = Path(folder).expanduser()
    found = [size for size in SIZES if (folder / f"{PRODUCTS}{size}.json").is_file()]
    if not found:
        raise CatalogueError(f"{folder} holds no {PRODUCTS}_1000.json or {PRODUCTS}.json. {DOWNLOAD_HELP}")
    size = found[0]
    nouns = folder / f"{NOUNS}{size}.json"
    return Files(
        _read(folder / f"{PRODUCTS}{size}.json", list),
        _read(folder / f"{INSTRUCTIONS}{size}.json", dict),
        _read(folder / HUMAN, dict) if human else None,
        _read(nouns, dict) if nouns.is_file() else None,
    )


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogueError(f"{path}: {error.strerror}. {DOWNLOAD_HELP}") from error
    except ValueError as error:
        raise CatalogueError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, kind):
        raise CatalogueError(f"{path} must hold a JSON {kind.__name__}, holds a {type(content).__name__}")
    return content


def derive(files: Files) -> tuple[list[Product], Skipped]:
    """Product records in file order. Malformed products are left out, at most 1 % of them. Raises CatalogueError."""
    rng = random.Random(SEED)  # of the price of a product with a price range
    products, seen, bad, reasons = [], set(), 0, []
    for raw in files.products:
        asin = raw.get("asin") if isinstance(raw, dict) else None
        if not isinstance(asin, str) or asin == "nan" or len(asin) > 10 or asin in seen:
            if not isinstance(asin, str):
                bad += 1
                reasons.append(f"no asin in {str(raw)[:60]}")
            continue  # the others are dropped by rule, as in the published engine
        try:
            products.append(_product(raw, files, rng))
        except (KeyError, TypeError, ValueError) as error:
            bad += 1
            reasons.append(f"{asin}: {error.args[0] if error.args else error}")
            continue
        seen.add(asin)
    if bad > MAX_BAD * len(files.products):
        raise CatalogueError(
            f"{bad} of {len(files.products)} products are malformed, first: {'; '.join(reasons[:5])}. {DOWNLOAD_HELP}"
        )
    if not products:
        raise CatalogueError(f"the catalogue has no usable product. {DOWNLOAD_HELP}")
    return products, Skipped(bad, reasons[:5])


def _product(raw: Mapping[str, Any], files: Files, rng: random.Random) -> Product:
    asin, name = raw["asin"], raw.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError("it has no name")
    bullets = raw.get("small_description") or []
    bullets = [bullets] if isinstance(bullets, str) else [str(bullet) for bullet in bullets]
    tag, prices = parse_price(raw.get("pricing") or "")
    price = prices[0] if len(prices) == 1 else rng.uniform(*prices)
    attributes = (files.instructions.get(asin) or {}).get("attributes") or [NO_ATTRIBUTE]
    return Product(
        asin=asin,
        name=name,
        category=str(raw["category"]),
        query=str(raw["query"]).lower().strip(),
        product_category=str(raw["product_category"]),
        description=str(raw.get("full_description") or ""),
        bullets=tuple(bullets),
        attributes=tuple(str(attribute) for attribute in attributes),
        options=parse_options(raw.get("customization_options") or {}),
        price_tag=tag,
        price=price,
        nouns=tuple((files.nouns or {}).get(asin, ())),
    )


def parse_price(text: str) -> tuple[str, list[float]]:
    """`$1,049.00` -> ("$1049.0", [1049.0]); `$20.00$35.50` -> ("$20.0 to $35.5", [20.0, 35.5]); "" -> $100.0."""
    digits = [re.sub(r"[^\d.]", "", part) for part in text.split("$")]
    prices = [float(part) for part in digits if part][:2]
    if not prices:
        return f"${NO_PRICE}", [NO_PRICE]
    return " to ".join(f"${price}" for price in prices), prices


def parse_options(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Names in lower case; values stripped, in lower case, with ` | ` for `/`. A name without a list is left out."""
    return {
        name.lower(): tuple(str(entry["value"]).strip().replace("/", " | ").lower() for entry in entries)
        for name, entries in raw.items()
        if entries
    }


def write_files(files: Files, folder: str | Path, size: str = "_1000") -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        (f"{PRODUCTS}{size}.json", files.products),
        (f"{INSTRUCTIONS}{size}.json", files.instructions),
        (HUMAN, files.human),
        (f"{NOUNS}{size}.json", files.nouns),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def indexed_text(product: Product) -> str:
    """What search looks at: title, description, first bullet, options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.name, product.description, *product.bullets[:1], options]).lower()
