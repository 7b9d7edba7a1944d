"""Search-QA as the trainer sees it: prompts and the parsing of replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envs.base import Task
from envs.search import actions

_RELEASED = """
You are an expert agent that answers questions with the help of a search engine.
Your question: {question}
{history}
Now it's your turn to respond for the current step.
You should first reason about what you know and what is missing. This reasoning MUST be enclosed within \
<think> </think> tags.
Then choose exactly one of the two:
(1) If you need knowledge that you do not have, search for it: <search> your query </search>
(2) If you know enough, give the answer, short and without explanation: <answer> your answer </answer>
"""
_HISTORY = """
So far you have taken {taken} step(s). The most recent of them, with what the search returned:
{entries}
"""
_NOTHING = "nothing"


class SearchDomain:
    """Prompts (style: "released" or "compact") and parsing of one run."""

    def __init__(self, style: str):
        if style not in ("released", "compact"):
            raise ValueError(f"env.prompt = {style!r}: Search-QA has the prompt styles 'released' and 'compact'")
        self.style = style

    def goal(self, first_observation: str) -> str:
        return first_observation

    def prompt(
        self, goal: str, history: list[tuple[str, str, str]], observation: str, admissible: Sequence[str], window: int
    ) -> str:
        """The user message of one turn. The question is always in it; what the searches found is in the history."""
        first = max(0, len(history) - window)
        entries = [
            f"Step {number}:{command or _NOTHING} {result}"
            for number, (_, command, result) in enumerate(history[first:], first + 1)
        ]
        if self.style == "compact":
            return "\n".join([f"your question: {goal}", *(" ".join(entry.split()) for entry in entries)])
        shown = _HISTORY.format(taken=len(history), entries="\n".join(entries)) if entries else ""
        return _RELEASED.format(question=goal, history=shown)

    def parse(self, reply: str) -> actions.Action:
        return actions.parse(reply)

    def solution(self, task: Task) -> list[str]:
        """The searches that find what the answer rests on, and the answer."""
        searches = [f"<search>{query}</search>" for query in task.source.get("queries") or []]
        return [*searches, f"<answer>{task.source['golds'][0]}</answer>"]

    def true_skill(self, task: Task) -> str:
        """What would solve this very question: its supporting titles where they are known."""
        hops = task.source.get("queries") or [task.source["question"]]
        plan = ", then ".join(f"search for {query}" for query in hops)
        return f"{plan}; then answer {task.source['golds'][0]}."

    def row_class(self, task: Task, episode: Any, index: int) -> str | None:
        turn = episode.turns[index]
        outcome = "success" if episode.won else "failure"
        if turn.command is None:
            return f"{outcome}: invalid action"
        return f"{outcome}: {actions.parse(turn.command).kind}"
