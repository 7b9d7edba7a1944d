"""Requests in, completions out: groups prompts by padded length and runs the jitted generator on fixed batch shapes.

A reply depends on its own prompt, parameters and key only; which requests share a batch decides how fast it comes,
not what it says.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from seed_jax import sharding
from seed_jax.models.spec import ModelSpec
from seed_jax.sampler.decode import generate
from seed_jax.sampler.sampling import request_keys
from seed_jax.types import Completion, SamplingParams


class Sampler:
    """Decodes batches of prompts with the current weights.

    batch: requests a call; prompt_bucket: prompts are padded to multiples of this many tokens; mesh: its fsdp axis
        splits the requests of a call (the weights in `params` must be on the same mesh).
    Counters in `stats`: requests, prompt_tokens, new_tokens, length_stops.
    """

    def __init__(
        self,
        spec: ModelSpec,
        eos_id: int,
        *,
        seed: int,
        batch: int = 64,
        prompt_bucket: int = 32,
        mesh: Mesh | None = None,
    ):
        self.spec, self.eos_id, self.seed, self.batch, self.prompt_bucket = spec, eos_id, seed, batch, prompt_bucket
        self.rows = None if mesh is None else sharding.batch_sharding(mesh)
        self.params = None
        self.stats = dict.fromkeys(("requests", "prompt_tokens", "new_tokens", "length_stops"), 0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        paths: Sequence[tuple[int, int, int]],
        *,
        seed: int | None = None,
        prompt_bucket: int | None = None,
    ) -> list[Completion]:
        """One completion a prompt, in order.

        paths: (stream, episode, turn) of each request; with `seed` (default: the sampler's) they determine its
            random key.
        """
        if self.params is None:
            raise RuntimeError("the sampler has no weights yet: set sampler.params")
        if params.max_tokens < 1:
            raise ValueError(f"max_tokens is {params.max_tokens}; a request needs a budget of at least 1 token")
        if any(len(p) == 0 for p in prompts):
            raise ValueError("an empty prompt cannot be decoded")
        results: list[Completion | None] = [None] * len(prompts)
        for indices, width in self._chunks(prompts, prompt_bucket or self.prompt_bucket):
            keys = self._keys(indices, paths, self.seed if seed is None else seed)
            for index, completion in zip(indices, self._run(prompts, indices, width, params, keys), strict=True):
                results[index] = completion
        assert all(r is not None for r in results), "requests in != completions out"
        return results

    def _chunks(self, prompts, bucket: int):
        """(request indices, padded prompt length) for each call: requests of one bucket, at most `batch` together."""
        by_width: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            by_width.setdefault(-(-len(prompt) // bucket) * bucket, []).append(index)
        for width, members in sorted(by_width.items()):
            for start in range(0, len(members), self.batch):
                yield members[start : start + self.batch], width

    def _rows(self, requests: int) -> int:
        """Two batch shapes only: full, and a quarter for what is left over."""
        return self.batch if requests > self.batch // 4 else max(1, self.batch // 4)

    def _keys(self, indices, paths, seed: int):
        path = np.zeros((self._rows(len(indices)), 3), np.uint32)
        path[: len(indices)] = [paths[index] for index in indices]
        return request_keys(seed, path)

    def _run(self, prompts, indices, width: int, params: SamplingParams, keys):
        rows = self._rows(len(indices))
        tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
        for row, index in enumerate(indices):
            prompt = prompts[index]
            tokens[row, width - len(prompt) :] = prompt
            lengths[row] = len(prompt)
        inputs = (tokens, lengths, np.asarray(keys), np.full(rows, params.temperature, np.float32))
        if self.rows is not None:
            inputs = jax.device_put(inputs, self.rows)
        out, logprobs, counts = map(
            np.asarray,
            generate(
                self.params,
                *inputs,
                spec=self.spec,
                max_tokens=params.max_tokens,
                eos_id=self.eos_id,
            ),
        )
        self.stats["requests"] += len(indices)
        self.stats["prompt_tokens"] += int(lengths.sum())
        self.stats["new_tokens"] += int(counts.sum())
        for row in range(len(indices)):
            n = int(counts[row])
            stopped = n > 0 and out[row, n - 1] == self.eos_id
            self.stats["length_stops"] += not stopped
            yield Completion(out[row, :n].tolist(), logprobs[row, :n].copy(), "stop" if stopped else "length")
