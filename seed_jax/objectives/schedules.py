"""How strong the teacher is at each update: plain numbers on the host, so no schedule ever compiles anything.

u counts updates from 1; one update is one rollout batch. The strength multiplies the coefficient of the distillation
term and the weight of the advantage shaping.
"""

from __future__ import annotations

from collections.abc import Mapping

SCHEDULES = ("const", "linear", "window", "handoff", "margin")

_SMOOTHING = 0.9  # of the gap's moving average
_PROGRESS = 0.99  # the average has shrunk if it is below this share of its best


def strength(
    kind: str,
    update: int,
    *,
    start: int,
    stop: int,
    end: float = 0.0,
    handoff: Mapping[str, float] | None = None,
    margin: Mapping[str, float] | None = None,
) -> float:
    """The teacher's strength in update u.

    - const: 1
    - linear: 1 up to update `start`, then a straight line to `end` at update `stop`, `end` after it
    - window: 1 in updates start..stop (both included), else 0 (ADRS, arXiv 2608.03223, uses 21..70)
    - handoff: 1 until the gap no longer shrinks, then a straight line to `end` over stop - start updates: see
        `watch_gap`, whose state is `handoff`
    - margin: the teacher's last margin over the student, as a share of its largest so far, 0 where it is not ahead: see
        `watch_margin`, whose state is `margin`; 1 until it is measured

    Raises:
        ValueError: unknown schedule.
    """
    if kind == "const":
        return 1.0
    if kind == "window":
        return float(start <= update <= stop)
    if kind == "linear":
        return 1.0 + (end - 1.0) * _progress(update, start, stop)
    if kind == "handoff":
        since = (handoff or {}).get("since", 0)
        return 1.0 + (end - 1.0) * _progress(update, since, since + stop - start) if since else 1.0
    if kind == "margin":
        return 1.0 if not margin else max(0.0, margin["last"]) / margin["best"] if margin["best"] > 0 else 0.0
    raise ValueError(f"schedule is {kind!r}; choose one of {', '.join(SCHEDULES)}")


def _progress(update: int, start: int, stop: int) -> float:
    """0 up to `start`, 1 from `stop` on."""
    return min(1.0, max(0.0, (update - start) / max(1, stop - start)))


def watch_gap(state: Mapping[str, float], gap: float, update: int, *, start: int, patience: int) -> dict[str, float]:
    """The handoff's memory after one more update: when the teacher has nothing left to teach.

    `gap` is the mean size of the teacher gap in this update (nats); updates without a teacher must not be reported.
    Once its moving average has not set a new low (1 % below the last one) for `patience` updates, and not before update
    `start`, `since` is set to the update, and stays. The other entries are the average and its best.
    """
    if state.get("since"):
        return dict(state)
    average = _SMOOTHING * state["average"] + (1 - _SMOOTHING) * gap if state else gap
    if not state or average < _PROGRESS * state["best"]:
        return {"average": average, "best": average, "stale": 0, "since": 0}
    stale = int(state["stale"]) + 1
    due = stale >= patience and update >= start
    return {"average": average, "best": state["best"], "stale": stale, "since": update if due else 0}


def watch_margin(state: Mapping[str, float], margin: float) -> dict[str, float]:
    """The margin schedule's memory after one more measurement: by how much the policy with a skill in its prompt won
    more often than without, on the same games. A teacher that the student has overtaken would only hold it back."""
    return {"last": margin, "best": max(margin, state.get("best", margin))}
