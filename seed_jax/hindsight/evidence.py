"""Skills that nobody has to write: a successful attempt of another episode of the group, what the environment answered
to each reply, the solution of the task. They are told as they are, in the words of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from seed_jax.types import Episode, Skill

SOURCES = ("peer_success", "env_feedback", "peer_feedback", "ground_truth")

Solve = Callable[[str], Sequence[str]]  # id of a task -> the commands that solve it
Truth = Callable[[str], str]  # id of a task -> the skill that would solve it


def solver(domain: Any, tasks: Iterable[Any]) -> Solve | None:
    """How to look up the solution of one of these tasks; None if the environment offers none."""
    if not hasattr(domain, "solution"):
        return None
    by_id = {task.id: task for task in tasks}
    return lambda task_id: domain.solution(by_id[task_id])


def truth(domain: Any, tasks: Iterable[Any]) -> Truth | None:
    """How to look up the true skill of one of these tasks; None if the environment knows none."""
    if not hasattr(domain, "true_skill"):
        return None
    by_id = {task.id: task for task in tasks}
    return lambda task_id: domain.true_skill(by_id[task_id])


def give_evidence(source: str, episodes: Sequence[Episode], style: str, solve: Solve | None = None) -> None:
    """Fills in `skill`, or `skill_error`, of every played episode.

    - peer_success: the commands of the next episode of the group that won; none if there is no other (SDPO,
        arXiv 2601.20802)
    - env_feedback: at each turn what the environment answered to the reply that is scored (SERL, arXiv 2605.19447)
    - peer_feedback: both; without a peer, the feedback alone
    - ground_truth: the commands that solve the task (OPSD, arXiv 2601.18734)
    """
    for episode in episodes:
        if not episode.turns or episode.error:
            continue
        if source == "ground_truth":
            text, steps = _told("These actions solve the task", solve(episode.task_id), style), ()
        else:
            text = _peer_text(episode, episodes, style) if source.startswith("peer") else None
            steps = () if source == "peer_success" else _feedback(episode, text, style)
        episode.skill = Skill("", text, steps) if text or steps else None
        missing = "no_solution" if source == "ground_truth" else "no_successful_peer"
        episode.skill_error = "" if episode.skill else missing


def _peer_text(episode: Episode, episodes: Sequence[Episode], style: str) -> str | None:
    peers = [e for e in episodes if e.group == episode.group and e.won and e is not episode and not e.error]
    if not peers:
        return None
    peer = next((e for e in peers if e.index > episode.index), peers[0])
    commands = [turn.command for turn in peer.turns if turn.command and turn.admissible]
    return _told("Another attempt succeeded with these actions", commands, style)


def _feedback(episode: Episode, peer_text: str | None, style: str) -> tuple[tuple[int, str], ...]:
    steps = []
    for number, turn in enumerate(episode.turns):
        answer = " ".join(turn.result.split())
        if answer:
            told = answer if style == "compact" else f"The environment will answer: {answer}"
            steps.append((number, "\n".join(filter(None, (peer_text, told)))))
    return tuple(steps)


def _told(what: str, commands: Sequence[str], style: str) -> str | None:
    if not commands:
        return None
    return " , ".join(commands) if style == "compact" else f"{what}: {', '.join(commands)}."
