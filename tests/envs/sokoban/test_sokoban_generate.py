"""Generated rooms: solvable, the same for the same seed, like the published ones, and in one split only."""

from __future__ import annotations

import hashlib
import itertools
import random
import time

import numpy as np
import pytest

from envs.sokoban import generate as rooms
from envs.sokoban.game import SokobanGame
from envs.sokoban.generate import GenerationError, Rules, first_levels, generate, split_of
from envs.sokoban.solve import solve


def test_a_thousand_rooms_are_solved_within_the_step_limit():
    """6 x 6, one box. The published generator: no room of 200 takes over 15 moves, 3.8 on average."""
    start = time.perf_counter()
    made = [generate(seed, Rules()) for seed in range(1000)]
    seconds = time.perf_counter() - start
    lengths = []
    for room, _ in made:
        game, moves = SokobanGame(room, max_steps=15), solve(room)
        reward = sum(game.step(move).reward for move in moves)
        assert game.room.solved and game.done and reward == pytest.approx(11 - 0.1 * len(moves))
        lengths.append(len(moves))
    retries = np.mean([attempts > 1 for _, attempts in made])
    print(f"{seconds:.2f} ms a room, {retries:.1%} retried, {np.mean(lengths):.2f} moves, at most {max(lengths)}")
    assert 3.5 < np.mean(lengths) < 4.3 and min(lengths) >= 1 and retries < 0.3


@pytest.mark.parametrize("rules", [Rules(5, 5), Rules(boxes=2), Rules(7, 9, 3), Rules(search_depth=5)])
def test_other_sizes(rules):
    for seed in range(10):
        room, _ = generate(seed, rules)
        assert (room.rows, room.columns, len(room.boxes), len(room.targets)) == (
            rules.rows,
            rules.columns,
            rules.boxes,
            rules.boxes,
        )
        assert room.placed == 0 and solve(room)


def test_a_seed_alone_decides():
    """Neither global generators nor earlier rooms count. The hash is of the frozen panel."""
    before = generate(7, Rules(boxes=2))
    random.seed(1), np.random.seed(1)
    state = random.getstate(), np.random.get_state()[1].tolist()
    generate(3, Rules())
    assert generate(7, Rules(boxes=2)) == before
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    panel = "\n\n".join(level.room.level() for level in first_levels("unseen", 32, Rules()))
    assert hashlib.sha256(panel.encode()).hexdigest()[:16] == "c50db775152d5790"


def test_no_room_of_a_panel_occurs_in_training():
    """Not even turned or mirrored. Raw training seeds do make rooms of the panels, which is why rooms have splits."""
    panels = {split: first_levels(split, 64, Rules()) for split in ("seen", "unseen")}
    forms = {split: {level.room.canonical() for level in panel} for split, panel in panels.items()}
    train = [level.room.canonical() for level in first_levels("train", 1500, Rules())]
    assert len(forms["seen"]) == len(forms["unseen"]) == 64 and len(set(train)) < len(train) == 1500
    assert forms["seen"].isdisjoint(forms["unseen"]) and (forms["seen"] | forms["unseen"]).isdisjoint(train)
    raw = [generate(seed, Rules())[0] for seed in range(1500)]
    assert any(room.canonical() in forms["seen"] | forms["unseen"] for room in raw)
    for room in raw[:50]:
        mirrored = room._replace(
            **{name: _mirrored(room, getattr(room, name)) for name in ("floor", "targets", "boxes")}
        )
        mirrored = mirrored._replace(player=next(iter(_mirrored(room, {room.player}))))
        assert split_of(mirrored) == split_of(room)


def _mirrored(room, cells):
    return frozenset(cell - 2 * (cell % room.columns) + room.columns - 1 for cell in cells)


def test_seed_ranges_do_not_overlap():
    ranges = sorted(rooms.SEEDS.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)) and len(ranges) == 3
    for split, (start, stop) in rooms.SEEDS.items():
        assert all(start <= level.seed < stop for level in first_levels(split, 3, Rules()))


def test_filter_by_length_of_the_solution():
    levels = first_levels("train", 20, Rules(min_moves=5, max_moves=6))
    assert {level.moves for level in levels} == {5, 6}
    assert [len(solve(level.room)) for level in levels] == [level.moves for level in levels]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(rows=4), "a room of 4 x 6 is too small; rows and columns are 5 or more"),
        (Rules(boxes=6), "6 boxes in a room of 6 x 6: there can be 1 to 5"),
        (Rules(boxes=0), "0 boxes in a room of 6 x 6"),
        (Rules(min_moves=9, max_moves=8), "solutions of 9 to 8 moves: no room has any"),
        (Rules(5, 5, min_moves=14), "the train split give 0 rooms of 5 x 5 with 1 boxes .* 14 to 15 moves"),
    ],
)
def test_impossible_rooms(rules, message):
    with pytest.raises(GenerationError, match=message):
        first_levels("train", 2, rules)


def test_a_generator_that_keeps_failing_stops(monkeypatch):
    monkeypatch.setattr(rooms, "_attempt", lambda rng, rules: None)
    with pytest.raises(GenerationError, match="seed 5: no room of 6 x 6 with 1 boxes and search depth 30 in 100 attem"):
        generate(5, Rules())
