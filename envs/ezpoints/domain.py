"""EZPoints as the trainer sees it: prompts and the parsing of replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.base import Task
from envs.ezpoints import actions
from envs.ezpoints.deal import read_cards, solution

GOAL = "write a formula that uses the numbers of both cards once and equals 12"
OBSERVATIONS = ("text", "image")
STYLES = ("released", "compact")
_RULES = """\
Each card gives the number that is on it; J, Q and K count as 10.
A formula is the two numbers with + or * between them, and = at its end. It is written one symbol at a step: a number \
of a card that is not used yet, an operator, or =, which ends the game.
You earn 10 if the formula uses both numbers and equals 12, and 0 otherwise. More than five symbols lose.
The formula so far: {formula}
Your admissible actions are: {actions}.

Now it's your turn to choose the next symbol.
Answer with one JSON object, in this form:
{{"thoughts": "what is on the cards, what the formula needs, what comes next", "action": "the next symbol"}}
"""
_TEXT = f"""
You are an expert player of the card game EZPoints.
Your task is to: {{goal}}.
{{cards}}.
{_RULES}"""
_IMAGE = f"""<image>
You are an expert player of the card game EZPoints. The picture shows two cards, and below them the formula so far.
Your task is to: {{goal}}.
{_RULES}"""


class EzpointsDomain:
    """Prompts (style "released" or "compact", of "text" or "image" observations) and parsing of one run.

    No prompt has a history: the formula says what was done.
    """

    def __init__(self, style: str, observation: str = "text", compat: bool = False):
        if style not in STYLES:
            raise ValueError(f"env.prompt = {style!r}: EZPoints has the prompt styles 'released' and 'compact'")
        if observation not in OBSERVATIONS:
            raise ValueError(f"env.observation = {observation!r}: EZPoints shows 'text' or an 'image'")
        if (style, observation) == ("compact", "image"):
            raise ValueError(
                "env.prompt = 'compact', env.observation = 'image': pictures have the style 'released' only"
            )
        self.style, self.observation, self.compat = style, observation, compat

    def goal(self, first_observation: str) -> str:
        return GOAL

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str:
        """The user message of one turn."""
        cards, written = observation.split("\n")
        written = written.removeprefix("Formula: ")
        if self.style == "compact":
            word = {symbol: word for word, symbol in actions.WORDS.items()}
            formula = "none" if written == "empty" else _worded(written.split(), word)
            ranks = " , ".join(card.split(" ")[0] for card in cards.removeprefix("Cards: ").split(", "))
            offered = _worded(admissible, word, " / ")
            return f"your task is to: {goal}\nhistory: {formula}\nnow: {ranks}\nactions: {offered}"
        # All actions are listed: those that are admissible would tell what is on the cards of the picture.
        formula = written.replace(" ", "")
        template = _IMAGE if self.observation == "image" else _TEXT
        return template.format(goal=goal, cards=cards, formula=formula, actions=", ".join(actions.ACTIONS))

    def parse(self, reply: str) -> actions.Action:
        return actions.parse_block(reply) if self.style == "compact" else actions.parse(reply, compat=self.compat)

    def solution(self, task: Task) -> list[str]:
        return solution(read_cards(task.source["cards"]))

    def true_skill(self, task: Task) -> str:
        """What would solve this very task."""
        return f"The formula for these cards is {' '.join(self.solution(task))}: write it symbol by symbol."

    def row_class(self, task: Task, episode: Any, index: int) -> str | None:
        command = episode.turns[index].command
        outcome = "success" if episode.won else "failure"
        if command is None:
            return f"{outcome}: invalid action"
        kind = "number" if command in actions.NUMBERS else "end" if command == actions.EQUALS else "operator"
        return f"{outcome}: {kind}"


def _worded(symbols: Sequence[str], words: dict[str, str], between: str = " ") -> str:
    return between.join(words.get(symbol, symbol) for symbol in symbols)
