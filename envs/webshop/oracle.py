"""Two policies without a model: one that knows the goal's product and options, one that clicks at random."""

from __future__ import annotations

import random

from envs.webshop.actions import SEARCH
from envs.webshop.session import Session

_WORDS_OF_A_QUERY = ("sturdy", "compact", "cream", "cable", "coat", "lamp", "travel")


def solve(session: Session) -> float:
    """Searches for the name of the product, opens it, selects the options, buys. Returns the score."""
    goal = session.goal
    session.reset()
    session.step(f"search[{goal.name.replace('[', ' ').replace(']', ' ')}]")
    while f"click[{goal.asin.lower()}]" not in session.actions():
        before = session.number
        session.step("click[next >]")
        if not session.view().listed or session.number == before:
            return 0.0
    session.step(f"click[{goal.asin.lower()}]")
    for option in _wanted(session):
        session.step(f"click[{option}]")
    session.step("click[buy now]")
    return session.task_score


def _wanted(session: Session) -> list[str]:
    options = session.goal.goal_options
    return list(options.values()) if isinstance(options, dict) else list(options)


def wander(session: Session, rng: random.Random, steps: int = 15) -> list[str]:
    """Random offered actions; returns them."""
    taken = []
    session.reset()
    for _ in range(steps):
        action = rng.choice(session.actions())
        if action == SEARCH:
            action = f"search[{rng.choice(_WORDS_OF_A_QUERY)}]"
        taken.append(action)
        if session.step(action).done:
            break
    return taken
