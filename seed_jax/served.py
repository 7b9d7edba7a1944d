"""A policy behind a chat service, in the place of sampler and tokenizer: the rollout cannot tell the difference.

The service knows its own tokens and template; here a token is a character, so that prompts and replies pass through
unchanged. Nothing can be trained from that, but a panel can be played.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from seed_jax.hindsight.client import Client, ClientError
from seed_jax.types import Completion, SamplingParams


class CharacterTokenizer:
    """The tokenizer's part that `seed_jax.tokenizer` calls, for chats of one user message."""

    def apply_chat_template(self, chats, *, tokenize: bool, add_generation_prompt: bool, **options) -> list[str]:
        if options or any([message["role"] for message in chat] != ["user"] for chat in chats):
            raise ValueError("a served model gets one user message, and its service applies the template")
        return [chat[0]["content"] for chat in chats]

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


class ServedSampler:
    """`generate` as the sampler has it, by a chat service. A request that fails for good is an error: panels have no
    gaps."""

    def __init__(self, client: Client):
        self.client = client

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        paths: Sequence[tuple[int, int, int]],
        *,
        seed: int = 0,
    ) -> list[Completion]:
        """paths: as for the sampler; with `seed` they determine the seed that is sent with each request."""
        texts = ["".join(map(chr, prompt)) for prompt in prompts]
        # A service may take other defaults from the model's generation config; of these only top_p is in the protocol.
        fields = [{"temperature": params.temperature, "top_p": 1.0, "seed": _seed(seed, *path)} for path in paths]
        answers = self.client.ask(texts, params.max_tokens, fields, reasoning=True)
        failed = sum(finish == "failed" for _, finish in answers)
        if failed:
            raise ClientError(
                f"{self.client.url} left {failed} of {len(answers)} requests without an answer, each after "
                f"{self.client.retries + 1} attempts of up to {self.client.timeout_s:g} s; is the service up?"
            )
        return [
            Completion([ord(character) for character in text], np.full(len(text), np.nan, np.float32), finish)
            for text, finish in answers
        ]


def _seed(*numbers: int) -> int:
    """31 bits that depend on all numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "big") >> 1
