"""A policy behind a chat service, in the place of sampler and tokenizer: the rollout cannot tell the difference.

The service knows its own tokens and template; here a token is a character, so that prompts and replies pass through
unchanged, and the place of an image is a run of characters that stand in no text. Nothing can be trained from that, but
a panel can be played.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from seed_jax.hindsight.client import Client, ClientError
from seed_jax.images import PLACEHOLDER
from seed_jax.models.vision_spec import VisionSpec
from seed_jax.types import Completion, SamplingParams

# Unicode's characters for an object inside of a text, and for the ends of an annotation.
_START, _IMAGE, _END = "\ufff9", "\ufffc", "\ufffb"
_PLACE = re.compile(f"{_START}{_IMAGE}+{_END}")


class CharacterTokenizer:
    """The tokenizer's part that `seed_jax.tokenizer` calls, for chats of one user message.

    vision: of the served model, which says at which size it reads images
    """

    def __init__(self, vision: VisionSpec | None = None):
        start, image, end = map(ord, (_START, _IMAGE, _END))
        self.vision = vision and dataclasses.replace(vision, start_token=start, image_token=image, end_token=end)

    def apply_chat_template(self, chats, *, tokenize: bool, add_generation_prompt: bool, **options) -> list[str]:
        if options or any([message["role"] for message in chat] != ["user"] for chat in chats):
            raise ValueError("a served model gets one user message, and its service applies the template")
        return [chat[0]["content"] for chat in chats]

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        return chr(ids) if isinstance(ids, int) else list(map(chr, ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class ServedSampler:
    """`submit` and `step` as the sampler has them, by a chat service: a step asks all that waits, and waits for all. A
    request that fails for good is an error: panels have no gaps."""

    def __init__(self, client: Client):
        self.client = client
        self.stats: Counter = Counter()
        self._waiting: dict[int, tuple[str, SamplingParams, int, Sequence[np.ndarray]]] = {}

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def key(self, path: Sequence[int], seed: int | None = None) -> int:
        """The seed that is sent with the request (stream, episode, turn)."""
        return _seed(0 if seed is None else seed, *path)

    def submit(self, prompt: Sequence[int], params: SamplingParams, key: int, images: Sequence[np.ndarray] = ()) -> int:
        handle = self.stats["requests"]
        self.stats["requests"] += 1
        text = "".join(map(chr, prompt))
        self._waiting[handle] = (_PLACE.sub(PLACEHOLDER, text) if images else text, params, key, images)
        return handle

    def abort_all(self) -> None:
        self._waiting = {}

    def step(self) -> list[tuple[int, Completion]]:
        asked, self._waiting = self._waiting, {}
        by_budget: dict[int, list[int]] = {}
        for handle, (_, params, _, _) in asked.items():
            by_budget.setdefault(params.max_tokens, []).append(handle)
        return [pair for budget, handles in by_budget.items() for pair in self._ask(budget, handles, asked)]

    def _ask(self, budget: int, handles: list[int], asked: dict) -> list[tuple[int, Completion]]:
        # A service may take other defaults from the model's generation config; of these only top_p is in the protocol.
        fields = [
            {"temperature": params.temperature, "top_p": params.top_p, "seed": key}
            for _, params, key, _ in (asked[handle] for handle in handles)
        ]
        texts, images = ([asked[handle][part] for handle in handles] for part in (0, 3))
        answers = self.client.ask(texts, budget, fields, reasoning=True, images=images)
        failed = sum(finish == "failed" for _, finish in answers)
        if failed:
            raise ClientError(
                f"{self.client.url} left {failed} of {len(answers)} requests without an answer, each after "
                f"{self.client.retries + 1} attempts of up to {self.client.timeout_s:g} s; is the service up?"
            )
        return [
            (handle, Completion([ord(letter) for letter in text], np.full(len(text), np.nan, np.float32), finish))
            for handle, (text, finish) in zip(handles, answers, strict=True)
        ]


def _seed(*numbers: int) -> int:
    """31 bits that depend on all numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "big") >> 1
