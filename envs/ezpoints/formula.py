"""The value of a formula of whole numbers, `+` and `*`: a tiny parser."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORMULA = re.compile(r"\d+(?:[+*]\d+)*", re.ASCII)


def value(symbols: Sequence[str]) -> int | None:
    """The value of the symbols written one behind the other (so `5` `7` is 57); None if they are no formula."""
    text = "".join(symbols)
    if not _FORMULA.fullmatch(text):
        return None
    total = 0
    for term in text.split("+"):
        product = 1
        for number in term.split("*"):
            product *= int(number)
        total += product
    return total
