"""Episodes of Sokoban that were seen as pictures, and the tokenizer of the tiny model that reads them."""

from __future__ import annotations

import functools

import numpy as np

from envs.sokoban.domain import GOAL, SokobanDomain
from envs.sokoban.game import make
from seed_jax import images
from seed_jax.types import Episode, Turn
from tests import tiny

ROOM = {"level": "#####\n#PXO#\n#___#\n#####\n"}
SIZE = (112, 140)  # of a picture with cells of 28 pixels: 20 tokens
TOKENS = 20
MOVES = ("up", "down", "right", "left", "down", "right", "right", "left", "up", "left")  # the first is blocked


@functools.cache
def tokenizer():
    words = tiny.vision_tokenizer()
    words.vision = tiny.vision_spec(len(words)).vision
    return words


def played(steps: int, task: str = "room", won: bool = False, mark: str = "") -> Episode:
    """An episode of `steps` moves that pushes nothing, or, if won, one that walks first and pushes at its end.

    mark: stands in each reply
    """
    game, domain = make(ROOM, max_steps=30, tile_px=28), SokobanDomain("released", "image")
    walk = [*["up"] * (1 - steps % 2), *["down", "up"] * ((steps - 1) // 2), "right"]
    moves = walk if won else MOVES[:steps]
    observation, episode = game.reset(), Episode(task, "boxes_1", GOAL, 0, 0)
    for move in moves:
        reply = f"<think>I look around{mark}.</think><action>{move}</action>"
        prompt = domain.prompt(GOAL, [], observation.text, observation.admissible, 0)
        seen, shown = observation, images.fit(observation.image, tokenizer().vision)
        observation = game.step(move)
        read = dict(prompt=prompt, prompt_ids=[], observation=seen.text, image=shown)
        done = dict(response=reply, response_ids=[], logprobs=None, command=move, valid=True, admissible=True)
        episode.turns.append(Turn(**read, **done, result=observation.text, reward=observation.reward))
    episode.won = observation.won
    assert episode.won == won and all(turn.image.shape == (*SIZE, 3) for turn in episode.turns)
    return episode


def same(found, expected) -> bool:
    """Whether two lists of images are equal, bit by bit."""
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))
