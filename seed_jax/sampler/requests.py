"""What the host keeps about requests: each one's prompt, images and random numbers, and the slots that they are in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from seed_jax import images as images_lib
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler.rooms import Room
from seed_jax.types import Completion, SamplingParams


class Seen(NamedTuple):
    """What a request shows, for prefill.

    images: [A, H, W, 3] uint8, A a power of two, the last ones zeros; index: [T] the place of each image token of the
    prompt among all of them, -1 for text; positions: [T, 3], see images.positions
    """

    images: np.ndarray
    index: np.ndarray
    positions: np.ndarray


@dataclass(eq=False)
class Request:
    handle: int
    prompt: list[int]
    params: SamplingParams
    draws: np.ndarray  # random numbers of all its tokens, [max_tokens + N, 2]
    room: Room
    seen: Seen | None = None  # until it is prefilled
    shift: int = 0  # what positions are behind columns by at the end of the prompt: an image takes few of them
    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)  # of each decode call, [2, n]
    place: tuple[Bank, int] | None = None  # bank and slot; None: it waits

    def completion(self, finish: str) -> Completion:
        plain, sampled = np.concatenate([np.zeros((2, 0), np.float32), *self.logprobs], axis=1)[:, : len(self.tokens)]
        return Completion(self.tokens, plain, finish, sampled)


class Bank:
    """The slots of one room on one replica: the cache there, and the state of its requests here."""

    def __init__(self, room: Room, cache: Any, replica: int, columns: Sequence[str]):
        """columns: of the integer state, see decode.int_columns"""
        self.room, self.cache, self.replica = room, cache, replica
        self.ints = np.zeros((room.slots, len(columns)), np.int32)
        self.floats = np.tile(np.array([1.0, 1.0, 0.0], np.float32), (room.slots, 1))
        self.requests: list[Request | None] = [None] * room.slots

    @property
    def free(self) -> list[int]:
        return [slot for slot, request in enumerate(self.requests) if request is None]

    @property
    def busy(self) -> int:
        return sum(request is not None for request in self.requests)

    def enter(self, request: Request, slot: int) -> None:
        p = request.params
        self.requests[slot], request.place = request, (self, slot)
        state = (request.prompt[-1], len(request.prompt) - 1, p.max_tokens, p.top_k, request.shift)
        self.ints[slot] = state[: self.ints.shape[1]]
        self.floats[slot] = (p.temperature, p.top_p, p.min_p)

    def leave(self, slot: int) -> None:
        self.requests[slot] = None
        self.ints[slot] = 0
        self.floats[slot] = (1.0, 1.0, 0.0)


def look(prompt: Sequence[int], images: Sequence[np.ndarray], spec: ModelSpec) -> tuple[Seen | None, int]:
    """(what a prompt shows, its `shift`); (None, 0) for text. Raises ValueError for what cannot be read."""
    vision = spec.vision
    if vision is None:
        if images:
            raise ValueError(f"a prompt has {len(images)} images, but the model has no vision")
        return None, 0
    ids = np.asarray(prompt)
    places = ids == vision.image_token
    for image in images:
        if image.dtype != np.uint8 or image.shape != images[0].shape or image.shape != (*_fitted(image, vision), 3):
            raise ValueError(
                f"an image is {image.dtype} {image.shape}; it must be uint8 [height, width, 3] of fitted size (see "
                "images.fit), and all of a prompt alike"
            )
    wanted = sum(images_lib.tokens_of(image, vision) for image in images)
    if places.sum() != wanted:
        raise ValueError(f"the prompt has {places.sum()} image tokens, but its {len(images)} images take {wanted}")
    if not images:
        return None, 0
    if places[-1]:
        raise ValueError("the prompt ends with an image; a reply begins after text")
    positions = images_lib.positions(ids, images, vision)
    padded = np.zeros((1 << (len(images) - 1).bit_length(), *images[0].shape), np.uint8)
    padded[: len(images)] = images
    index = np.where(places, np.cumsum(places) - 1, -1).astype(np.int32)
    return Seen(padded, index, positions), int(positions[-1, 0]) - (len(ids) - 1)


def _fitted(image: np.ndarray, vision) -> tuple[int, ...]:
    return images_lib.fitted_size(*image.shape[:2], vision) if image.ndim == 3 else ()


def check(prompt: Sequence[int], params: SamplingParams, vocab: int, text: Callable | None) -> None:
    """Raises ValueError, naming the field, for what cannot be decoded."""
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens is {params.max_tokens}; a request needs a budget of at least 1 token")
    if len(prompt) == 0:
        raise ValueError("an empty prompt cannot be decoded")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise ValueError(f"the prompt has token ids {min(prompt)} to {max(prompt)}; the vocabulary is 0 to {vocab - 1}")
    if not params.temperature >= 0:
        raise ValueError(f"temperature is {params.temperature}; it must be 0 (greedy) or more")
    if params.top_k < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
        raise ValueError(
            f"top_k = {params.top_k} must be 0 (off) or more, top_p = {params.top_p} above 0 and at most 1 (off), "
            f"min_p = {params.min_p} from 0 (off) to 1"
        )
    if (params.stop or params.stop_json) and text is None:
        raise ValueError("stop texts need Sampler(..., text=decode), the function that turns token ids into text")
    if "" in params.stop:
        raise ValueError("stop has an empty text, which every reply contains; remove it")
