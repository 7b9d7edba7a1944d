"""What GiGPO, HGPO and span selection need to know about every turn: its return, what was observed before, its span."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from seed_jax.objectives.advantages import BY_STEP
from seed_jax.spans import name_mask, numbered_names, span_mask
from seed_jax.types import Episode, Turn


def turn_credit(config, tokenizer, episodes: Sequence[Episode]) -> dict[tuple[int, int], dict[str, Any]]:
    """(episode's place, turn number) -> the fields of a Sample that only some methods use. Empty if none is used."""
    fields: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    if config.adv.kind in BY_STEP:
        for e, episode in enumerate(episodes):
            for t, value in enumerate(step_returns(episode.turns, config.adv.gamma)):
                fields[e, t]["step_return"] = value
        found = anchors(episodes, config.adv.anchor_similarity)
        if config.adv.kind == "hgpo":
            found = histories(episodes, found, config.env.history + 1)
        for key, anchor in found.items():
            fields[key]["anchor"] = anchor
    if config.distill.span != "all" or config.distill.hide_places:
        for e, episode in enumerate(episodes):
            been: set[str] = set()  # numbered names in the commands so far
            for t, turn in enumerate(episode.turns):
                span = span_mask(tokenizer, turn.response_ids, config.distill.span)
                if config.distill.hide_places and episode.skill:
                    secret = numbered_names(episode.skill.at(t) or "") - been
                    known = ~name_mask(tokenizer, turn.response_ids, secret)
                    span = known if span is None else span & known
                    been |= numbered_names(turn.command or "")
                fields[e, t]["span"] = span
    return fields


def step_returns(turns: Sequence[Turn], gamma: float) -> list[float]:
    """The discounted reward from each turn on: G_t = r_t + gamma G_(t + 1)."""
    returns, following = [], 0.0
    for turn in reversed(turns):
        following = turn.reward + gamma * following
        returns.append(following)
    return returns[::-1]


def anchors(episodes: Sequence[Episode], similarity: float) -> dict[tuple[int, int], int]:
    """(episode's place, turn number) -> number of the observation before the turn, counted from 0 in each group.

    Equal observations share a number; with a similarity below 1 also those whose difflib ratio to the first observation
    of a number reaches it (the first such number counts).
    """
    known: dict[int, dict[str, int]] = defaultdict(dict)
    firsts: dict[int, list[str]] = defaultdict(list)
    result = {}
    for e, episode in enumerate(episodes):
        numbers, representatives = known[episode.group], firsts[episode.group]
        for t, turn in enumerate(episode.turns):
            text = turn.observation
            if text not in numbers:
                numbers[text] = _similar(text, representatives, similarity)
                if numbers[text] == len(representatives):
                    representatives.append(text)
            result[e, t] = numbers[text]
    return result


def histories(
    episodes: Sequence[Episode], anchors: dict[tuple[int, int], int], levels: int
) -> dict[tuple[int, int], tuple[int, ...]]:
    """(episode's place, turn number) -> one number a level: equal numbers of level k mean equal last k observations.

    Numbers are counted from 0 in each group and level. What is shorter than k equals only what is as short.
    """
    known: dict[tuple[int, int], dict[tuple[int, ...], int]] = defaultdict(dict)
    result = {}
    for e, episode in enumerate(episodes):
        seen: tuple[int, ...] = ()
        for t in range(len(episode.turns)):
            seen = (*seen, anchors[e, t])
            numbers = []
            for level in range(1, levels + 1):
                table = known[episode.group, level]
                numbers.append(table.setdefault(seen[-level:], len(table)))
            result[e, t] = tuple(numbers)
    return result


def _similar(text: str, representatives: Sequence[str], similarity: float) -> int:
    """The first representative that is similar enough, or the number of a new one."""
    if similarity < 1.0:
        for number, other in enumerate(representatives):
            if difflib.SequenceMatcher(None, other, text, autojunk=False).ratio() >= similarity:
                return number
    return len(representatives)
