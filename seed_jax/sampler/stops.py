"""Ends of a reply that only its text shows. Checked on the host, between two decode calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seed_jax.types import SamplingParams


def json_closed(text: str) -> bool:
    """Whether the first "{" of the text has met the "}" that closes it; braces in JSON strings do not count."""
    depth, quoted, escaped = 0, False, False
    start = text.find("{")
    for letter in text[start:] if start >= 0 else "":
        if quoted:
            quoted = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            quoted = True
        elif letter in "{}":
            depth += 1 if letter == "{" else -1
            if depth == 0:
                return True
    return False


def ended(text: str, params: SamplingParams) -> bool:
    return any(stop in text for stop in params.stop) or (params.stop_json and json_closed(text))


def cut(decode: Callable[[Sequence[int]], str], tokens: list[int], new: int, params: SamplingParams) -> int | None:
    """How many of `tokens` to keep, of which the last `new` have not been checked before: the fewest whose text has
    ended. None if it goes on."""
    if not ended(decode(tokens), params):
        return None
    for count in range(len(tokens) - new + 1, len(tokens)):
        if ended(decode(tokens[:count]), params):
            return count
    return len(tokens)
