"""One question as a game, and the pool that runs many: all queries of a step reach the retriever in one call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from envs.base import EnvError, Obs, Task
from envs.search.actions import Offered, clean_query, parse
from envs.search.retrieval import Hit, Retriever
from envs.search.scoring import exact_match, sub_exact_match

NO_HITS = "No results found."
OFFERED = Offered(("<search>your query</search>", "<answer>your answer</answer>"))
FORMS = ("plain", "json")
ABORT_SHARE = 0.05  # of the episodes of an `open`: more lost ones than this end the run


class RetrievalDown(RuntimeError):
    """The retriever fails for more episodes than a run may lose."""


class Protocol(NamedTuple):
    """The rules of an episode. A search in the last turn is not executed."""

    max_steps: int = 4
    topk: int = 3
    form: str = "plain"  # of the information block, see `information`
    passage_chars: int = 1200  # of one passage, its title included
    block_chars: int = 4000  # of all passages of an answer


def information(hits: Sequence[Hit], rules: Protocol) -> str:
    """What the policy reads of an answer. Angle brackets of passages are escaped: no passage can answer or end the
    block.

    plain: the passages as they are; json: a JSON object with newlines and non-ASCII letters escaped, as the public
    reference writes it.
    """
    room, lines = rules.block_chars, []
    for number, hit in enumerate(hits, 1):
        text = _shorten(hit.passage.contents, min(rules.passage_chars, room))
        if not text:
            break
        room -= len(text)
        lines.append(f"Doc {number}: {text}")
    body = "\n".join(lines).replace("<", "&lt;").replace(">", "&gt;") or NO_HITS
    if rules.form == "json":
        return f"<information>{json.dumps({'result': body})}</information>"
    return f"<information>\n{body}\n</information>"


def _shorten(text: str, limit: int) -> str:
    """At most `limit` characters, cut between words."""
    text = text.strip()
    if len(text) <= limit:
        return text
    cut = text[:limit].rsplit(" ", 1)[0]
    return cut.rstrip()


class QuestionGame:
    """State of one episode. `ask` says what to search for, `answer` takes the hits; `step` is both at once."""

    def __init__(self, source: dict[str, Any], retriever: Retriever, rules: Protocol):
        self.question, self.golds = source["question"], source["golds"]
        self.retriever, self.rules = retriever, rules
        self.turn, self.searches, self.prediction = 0, 0, None
        self.done = False

    def reset(self) -> Obs:
        self.turn, self.searches, self.prediction, self.done = 0, 0, None, False
        return Obs(self.question, OFFERED, won=False, done=False)

    def step(self, command: str) -> Obs:
        query = self.ask(command)
        return self.respond(self.retriever.search([query], self.rules.topk)[0] if query else None)

    def ask(self, command: str) -> str:
        """Plays a command; returns the query that it needs, "" for none."""
        if self.done:
            raise ValueError("the episode is over; reset() starts it again")
        self.turn += 1
        action = parse(command)
        if action.kind == "answer":
            self.prediction = action.content
        self.done = action.kind == "answer" or self.turn >= self.rules.max_steps
        query = clean_query(action.content) if action.kind == "search" and not self.done else ""
        self.searches += bool(query)
        return query

    def respond(self, hits: Sequence[Hit] | None) -> Obs:
        """The observation after `ask`; hits: what its query found, None if there was none."""
        if self.done:
            won = exact_match(self.prediction, self.golds)
            return Obs("", (), won=won, done=True, reward=float(won), measures=self._measures())
        text = "" if hits is None else information(hits, self.rules)
        return Obs(text, OFFERED, won=False, done=False, measures=self._measures())

    def _measures(self) -> tuple[tuple[str, float], ...]:
        """Beside exact match, which is success."""
        return ("sub_em", float(sub_exact_match(self.prediction, self.golds))), ("searches", float(self.searches))


class SearchPool:
    """Pool of questions (envs/pool.py: Pool) in this process, with one retriever."""

    def __init__(self, retriever: Retriever, rules: Protocol):
        self.retriever, self.rules = retriever, rules
        self._games: dict[int, QuestionGame] = {}
        self._opened = self._lost = 0
        self._counts = {"restarts": 0, "timeouts": 0, "recycled": 0, "errors": 0, "searches": 0}

    def open(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Obs | EnvError]:
        for slot, task in zip(slots, tasks, strict=True):
            self._games[slot] = QuestionGame(task.source, self.retriever, self.rules)
        self._opened, self._lost = len(slots), 0
        return [self._games[slot].reset() for slot in slots]

    def step(self, slots: Sequence[int], commands: Sequence[str]) -> list[Obs | EnvError]:
        """Raises RetrievalDown if too many episodes of the last `open` are lost to the retriever."""
        closed = [slot for slot in slots if slot not in self._games]
        if closed or len(set(slots)) != len(slots):
            raise ValueError(f"slots {closed or list(slots)} are not open, or are named twice")
        queries = {}
        for slot, command in zip(slots, commands, strict=True):
            if query := self._games[slot].ask(command):
                queries[slot] = query
        found = self._find(queries)
        return [
            self._lose(slot, found[slot])
            if isinstance(found.get(slot), Exception)
            else self._games[slot].respond(found.get(slot))
            for slot in slots
        ]

    def _find(self, queries: dict[int, str]) -> dict[int, list[Hit] | Exception]:
        self._counts["searches"] += len(queries)
        if not queries:
            return {}
        try:
            answers: Sequence[Any] = self.retriever.search(list(queries.values()), self.rules.topk)
        except EnvError as error:  # the service is down, for all of them
            answers = [error] * len(queries)
        return dict(zip(queries, answers, strict=True))

    def _lose(self, slot: int, error: Exception) -> EnvError:
        """The episode ends without a verdict: an error is never shown to the policy as evidence."""
        del self._games[slot]
        self._lost += 1
        self._counts["errors"] += 1
        if self._lost > ABORT_SHARE * self._opened:
            raise RetrievalDown(
                f"{self._lost} of {self._opened} episodes are lost to the retriever, more than "
                f"{ABORT_SHARE:.0%}; the run stops, and resumes from its last checkpoint. Last error: {error}"
            )
        return error if isinstance(error, EnvError) else EnvError(str(error))

    def prefetch(self, slots: Sequence[int], tasks: Sequence[Task]) -> None:
        """Nothing: a question costs nothing to open."""

    def stats(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        self._games.clear()
