"""The shortest solution of a room by breadth-first search: the oracle, and the measure of difficulty."""

from __future__ import annotations

from collections import deque

from envs.sokoban.room import ACTIONS, Room

MAX_STATES = 300_000


class SearchLimit(RuntimeError):
    """Neither a solution nor its absence was found within the number of states."""


def solve(room: Room, max_states: int = MAX_STATES) -> list[str] | None:
    """The fewest moves that bring every box onto a target; None if there are none. Raises SearchLimit."""
    if room.solved:
        return []
    came: dict[tuple, tuple | None] = {_key(room): None}  # state -> (state before, action)
    queue = deque([room])
    while queue:
        state = queue.popleft()
        for action in ACTIONS:
            after = state.moved(action)
            if _key(after) in came:
                continue
            came[_key(after)] = (_key(state), action)
            if after.solved:
                return _path(came, _key(after))
            if len(came) > max_states:
                raise SearchLimit(f"no answer after {max_states} states")
            queue.append(after)
    return None


def _key(room: Room) -> tuple:
    return room.player, room.boxes


def _path(came: dict, key: tuple) -> list[str]:
    moves = []
    while came[key] is not None:
        key, action = came[key]
        moves.append(action)
    return moves[::-1]
