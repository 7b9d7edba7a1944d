"""Moves against a simulation on characters, level texts, the solver, and levels of files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from envs.sokoban.domain import SokobanDomain
from envs.sokoban.files import read_rooms
from envs.sokoban.generate import Rules, generate
from envs.sokoban.room import ACTIONS, SYMBOLS, LevelError, read_level
from envs.sokoban.solve import SearchLimit, solve

CORRIDOR = "#####\n#PXO#\n#___#\n#####"
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LEAVES, BOX_COMES, BOX_GOES = (
    dict(zip("PS", "_O", strict=True)),
    dict(zip("_O", "X√", strict=True)),
    dict(zip("X√", "_O", strict=True)),
)


def simulated(level: str, action: str) -> str:
    """One move, on characters."""
    grid = [list(line) for line in level.split("\n")]
    row, column = next((r, c) for r, line in enumerate(grid) for c, cell in enumerate(line) if cell in "PS")
    down, right = STEPS[action]
    ahead, behind = (row + down, column + right), (row + 2 * down, column + 2 * right)
    if grid[ahead[0]][ahead[1]] in BOX_GOES:
        if grid[behind[0]][behind[1]] not in BOX_COMES:
            return level
        grid[behind[0]][behind[1]] = BOX_COMES[grid[behind[0]][behind[1]]]
        grid[ahead[0]][ahead[1]] = BOX_GOES[grid[ahead[0]][ahead[1]]]
    if grid[ahead[0]][ahead[1]] == "#":
        return level
    grid[row][column] = LEAVES[grid[row][column]]
    grid[ahead[0]][ahead[1]] = "PS"["_O".index(grid[ahead[0]][ahead[1]])]
    return "\n".join("".join(line) for line in grid)


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_move_as_the_simulation_does(seed):
    rng = random.Random(seed)
    room = generate(seed, Rules(7, 8, 3, 30))[0]
    changes = 0
    for _ in range(300):
        action, before = rng.choice(ACTIONS), room
        room = room.moved(action)
        assert room.level() == simulated(before.level(), action)
        changes += room.boxes != before.boxes
        assert read_level(room.level()) == room
    assert changes > 2


def test_forms_of_text():
    room = read_level("#####\n#S_X#\n#√_O#\n#_X_#\n#####")
    assert room.table().split("\n")[1] == " # \t S \t _ \t X \t # \t"
    assert room.digits() == "0 0 0 0 0 / 0 6 1 4 0 / 0 3 1 2 0 / 0 1 4 1 0 / 0 0 0 0 0"
    usual = "#####\n#+ $#\n#* .#\n# $ #\n#####"
    assert read_level(usual) == room and read_level(f"\n{usual}\n") == room
    assert (room.placed, room.solved) == (1, False)


def test_turned_and_mirrored_rooms_have_one_canonical_form():
    level = "######\n#P_X_#\n#_O#_#\n######"
    lines = level.split("\n")
    turned = "\n".join("".join(column) for column in zip(*lines[::-1], strict=True))
    images = [level, turned, "\n".join(line[::-1] for line in lines), "\n".join(lines[::-1])]
    assert len({read_level(image).canonical() for image in images}) == 1
    assert read_level("######\n#P__X#\n#_O#_#\n######").canonical() != read_level(level).canonical()


# -- the solver


@pytest.mark.parametrize(
    ("level", "moves"),
    [
        (CORRIDOR, ["right"]),
        ("#####\n#_P_#\n#_X_#\n#_O_#\n#####", ["down"]),
        ("######\n#OX_P#\n#____#\n######", ["left", "left"]),
        ("#####\n#√P_#\n#####", []),
        ("#####\n#XPO#\n#####", None),  # the box is in a corner
        ("######\n#OXXP#\n#O___#\n######", None),
    ],
)
def test_shortest_solutions(level, moves):
    assert solve(read_level(level)) == moves


def test_no_shorter_solution_exists():
    """All sequences of moves, for short solutions."""
    checked = 0
    for seed in range(40):
        room = generate(seed, Rules())[0]
        moves = solve(room)
        if len(moves) > 5:
            continue
        reached = {room}
        for _ in range(len(moves) - 1):
            reached |= {state.moved(action) for state in reached for action in ACTIONS}
            assert not any(state.solved for state in reached)
        checked += 1
    assert checked > 20


def test_the_search_ends():
    with pytest.raises(SearchLimit, match="after 20 states"):
        solve(generate(0, Rules(8, 8, 3, 30))[0], max_states=20)


# -- what is no level


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("", r"line 1, column|border|players"),
        ("#####\n#PXO#\n####", "line 3 has 4 cells, line 1 has 5"),
        ("#####\n#PaO#\n#####", r"line 2, column 3: 'a' is no cell; use # _ O √ X P S"),
        ("#####\n#PXO_\n#####", "line 2, column 5: the border is open"),
        ("##_##\n#PXO#\n#####", "line 1, column 3: the border is open"),
        ("#####\n#_XO#\n#####", "there are 0 players; a level has exactly one"),
        ("#####\n#PXS#\n#####", "there are 2 players; line 2, column 2; line 2, column 4"),
        ("#####\n#PX_#\n#####", "there are 1 boxes and 0 targets"),
        ("#####\n#P__#\n#####", "there are 0 boxes and 0 targets"),
    ],
)
def test_malformed_levels(level, message):
    with pytest.raises(LevelError, match=message):
        read_level(level)


def test_levels_of_a_folder(tmp_path: Path):
    (tmp_path / "seen.txt").write_text(f"{CORRIDOR}\n\n\n{CORRIDOR.replace('PXO', 'OXP')}\n", encoding="utf-8")
    found = read_rooms(tmp_path, "seen")
    assert [(name, room.level()[6:11], moves) for name, room, moves in found] == [
        ("00001", "#PXO#", 1),
        ("00002", "#OXP#", 1),
    ]
    bad = {
        "#####\n#XPO#\n#####": "level 2: has no solution",
        "#####\n#√P_#\n#####": "level 2: is solved already",
        "#####\n#PXO#\n####": "level 2: line 3 has 4 cells",
    }
    for level, message in bad.items():
        (tmp_path / "seen.txt").write_text(f"{CORRIDOR}\n\n{level}\n", encoding="utf-8")
        with pytest.raises(LevelError, match=rf"seen\.txt, {message}"):
            read_rooms(tmp_path, "seen")
    with pytest.raises(LevelError, match=r"unseen\.txt cannot be read .*env\.data='generated'"):
        read_rooms(tmp_path, "unseen")


def test_symbols_are_those_that_the_prompt_explains():
    prompt = SokobanDomain("released").prompt("x", [], "", (), 2)
    named = ["# is a wall", "_ floor", "O a target", "√ a box on a target", "X a box", "P you", "S you on a target"]
    assert all(name in " ".join(prompt.split()) for name in named) and "".join(name[0] for name in named) == SYMBOLS
